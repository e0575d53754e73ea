"""`python -m loadtests.fidelity`: fit the engine model's speed to a real vLLM, and say how far off it is."""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from extproc.adapters.child_process import ChildError, ChildProcess
from extproc.core.errors import WarmrouteError
from extproc.demo import vllm_command
from extproc.sim.engine_types import EngineConfig
from extproc.sim.time_model import TimeModel
from loadtests.fidelity.measure import Report, measure
from loadtests.live.http1 import HttpError, Pool, encode
from loadtests.live.peers import setting

_START_S = 300.0
_MODEL_LEN = 8192  # of `vllm_command`
_SEQUENCES = 16


def main() -> int:
    """Parse, measure, print. Exit code 1 where measuring was impossible."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.fidelity", description=__doc__)
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", help="Python that has vLLM (default: WARMROUTE_VLLM_PYTHON)"
    )
    parser.add_argument("--requests", type=int, default=60, metavar="N", help="held-out requests")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each is measured")
    parser.add_argument("--blocks", type=int, default=1024, metavar="N", help="KV blocks of the engine")
    parser.add_argument(
        "--step-tokens", type=int, default=2048, metavar="N", help="its max_num_batched_tokens"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests")
    parser.add_argument("--json", metavar="FILE", help="write everything here")
    args = parser.parse_args()
    console = Console(stderr=True)
    try:
        report = asyncio.run(_run(args, console))
    except WarmrouteError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    _show(report, args, Console())
    if args.json:
        Path(args.json).write_text(json.dumps(document(report), indent=2) + "\n", encoding="utf-8")
    return 0


def document(report: Report) -> dict[str, Any]:
    """The JSON report. Times in milliseconds."""
    return {
        "fitted": dataclasses.asdict(report.fitted),
        "calibration_median_error": report.calibration_error,
        "held_out": {
            "requests": len(report.compared),
            "rank_correlation": report.rank_correlation,
            "median_error": report.median_error,
            "p90_error": report.p90_error,
        },
        "requests": [dataclasses.asdict(one) for one in report.compared],
    }


def engine_options(time_model: TimeModel) -> list[str]:
    """Options of `warmroute engine` that give it this speed."""
    return [
        *("--step-ms", f"{time_model.base_ms:.4g}"),
        *("--prefill-tokens-per-s", f"{1000 / max(time_model.prefill_ms_per_token, 1e-6):.6g}"),
        *("--attention-ms-per-pair", f"{time_model.attention_ms_per_pair:.4g}"),
        *("--decode-ms-per-seq", f"{time_model.decode_ms_per_sequence:.4g}"),
        *("--context-ms-per-token", f"{time_model.context_ms_per_token:.4g}"),
    ]


async def _run(args: argparse.Namespace, console: Console) -> Report:
    python = args.vllm_python or setting("WARMROUTE_VLLM_PYTHON")
    if not python:
        raise WarmrouteError("name a Python that has vLLM with --vllm-python or WARMROUTE_VLLM_PYTHON")
    config = EngineConfig(
        block_size=vllm_command.CPU_BLOCK_SIZE,
        num_gpu_blocks=args.blocks,
        max_num_seqs=_SEQUENCES,
        max_num_batched_tokens=args.step_tokens,
        max_model_len=_MODEL_LEN,
    )
    async with _engine(python, args, console) as address:
        return await measure(
            address,
            config,
            requests=args.requests,
            rounds=args.rounds,
            seed=args.seed,
            on_round=lambda n: console.print(f"round {n + 1} of {args.rounds}", style="dim"),
        )


@contextlib.asynccontextmanager
async def _engine(python: str, args: argparse.Namespace, console: Console) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="warmroute-fidelity-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        command, environment = vllm_command.build(python, directory / "engine", args.blocks)
        command += ["--max-num-batched-tokens", str(args.step_tokens)]
        endpoint, *_ = vllm_command.endpoints(command)
        console.print("starting a real vLLM", style="dim")
        child = ChildProcess(
            command, directory / "engine.log", env={**environment, "VLLM_SERVER_DEV_MODE": "1"}
        )
        async with child:
            await _healthy(child, endpoint)
            yield endpoint


async def _healthy(child: ChildProcess, endpoint: str) -> None:
    deadline = time.monotonic() + _START_S
    async with Pool(endpoint) as pool:
        while True:
            with contextlib.suppress(OSError, HttpError):
                if (await pool.request(encode("GET", "/health", endpoint))).status == 200:
                    return
            if not child.running or time.monotonic() > deadline:
                raise ChildError(f"vLLM did not start:\n{child.log_tail()}")
            await asyncio.sleep(0.1)


def _show(report: Report, args: argparse.Namespace, console: Console) -> None:
    table = Table(
        title=f"Predicted against real TTFT, {len(report.compared)} held-out requests, "
        f"least of {args.rounds} rounds",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("rank correlation", f"{report.rank_correlation:.3f}")
    table.add_row("median absolute error", f"{report.median_error:.1%}")
    table.add_row("90th percentile of it", f"{report.p90_error:.1%}")
    table.add_row("median error of the calibration itself", f"{report.calibration_error:.1%}")
    for title, alone in (("alone", True), ("several at once", False)):
        errors = sorted(abs(one.error) for one in report.compared if (one.together == 1) is alone)
        if errors:
            table.add_row(f"median, {title} ({len(errors)})", f"{errors[len(errors) // 2]:.1%}")
    console.print(table)
    fitted = report.fitted
    console.print(
        f"outside the steps: {fitted.request_ms:.2f} ms a request, "
        f"{fitted.request_ms_per_token * 1000:.3f} ms per 1,000 prompt tokens"
    )
    line = " ".join(engine_options(fitted.time))
    console.print(f"warmroute engine {line}", soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
