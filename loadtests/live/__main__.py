"""`python -m loadtests.live`: what Warmroute costs and saves, beside plain proxies and other routers.

Needs a real Envoy (pip install 'warmroute[demo]'). The Rust routers are taken from the virtual environment
that --peers-venv or WARMROUTE_PEERS_VENV names, and left out, with the reason, where there is none.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from extproc.core.errors import WarmrouteError
from loadtests.live import alone, bench, beside, peers, report
from loadtests.live.fleet import Fleet, start_simulated, start_trivial, start_vllm
from loadtests.live.load import throughput_tool
from loadtests.live.quality import FULL, QUICK, WORKLOADS, Shape
from loadtests.live.targets import DIRECT, ENVOY, ROUND_ROBIN, TRIVIAL, WARMROUTE, Target, rust_targets

PARTS = ("overhead", "quality", "alone", "beside")
"""The first two are done where none is named; of the others each answers one question."""
SIMULATED_OPTIONS = ("--prefill-tokens-per-s", "12000", "--step-ms", "4", "--attention-ms-per-pair", "2.5e-6")
_SIMULATED_BLOCK = 16


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m loadtests.live",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--quick", action="store_true", help="small sizes: does it work, not how good is it")
    out.add_argument("--only", choices=PARTS, help="one of the parts")
    out.add_argument(
        "--engine", choices=("simulated", "vllm"), default="simulated", help="for the quality part"
    )
    out.add_argument("--vllm-python", metavar="PYTHON", help="has vLLM (default: WARMROUTE_VLLM_PYTHON)")
    out.add_argument("--peers-venv", metavar="DIR", help=f"has the Rust routers (default: {peers.SETTING})")
    out.add_argument("--engines", type=_positive, default=4, metavar="N", help="engines of the quality part")
    out.add_argument("--repetitions", type=_positive, metavar="N", help="of each quality run (default: 3)")
    out.add_argument("--rounds", type=_positive, metavar="N", help="of the overhead part (default: 3)")
    out.add_argument("--workload", choices=WORKLOADS, help="one of the workloads of the quality part")
    out.add_argument("--policies", nargs="+", metavar="POLICY", default=["token-load"], help="of Warmroute")
    out.add_argument(
        "--peer-policies", nargs="+", metavar="POLICY", default=["cache_aware"], help="of the Rust routers"
    )
    out.add_argument(
        "--gateways-first",
        action="store_true",
        help="in the quality part: proxies, routers and the client never wait for a core (needs root)",
    )
    out.add_argument("--json", metavar="FILE", help="write everything here")
    out.add_argument("--markdown", metavar="FILE", help="write the tables here")
    out.add_argument("--decisions", metavar="DIR", help="keep Warmroute's decision logs here")
    return out


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def quality_targets(policies: Sequence[str], peer_policies: Sequence[str]) -> list[Target]:
    """Envoy's round robin first, then the Rust routers, then ours."""
    return [
        ROUND_ROBIN,
        *(target for policy in peer_policies for target in rust_targets(policy)),
        *(
            WARMROUTE if policy == WARMROUTE.policy else Target(f"Warmroute {policy}", "warmroute", policy)
            for policy in policies
        ),
    ]


def main() -> int:
    """Run. Exit code 1 where a request failed or nothing could be measured."""
    args = parser().parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="warmroute-live-", ignore_cleanup_errors=True) as folder:
        try:
            made = asyncio.run(_main(args, Path(folder), console))
        except asyncio.CancelledError:
            console.print("interrupted; everything that was started has been stopped")
            return 130
        except WarmrouteError as error:
            console.print(str(error), style="red", markup=False)
            return 1
    about, overhead, quality, single, skipped = made
    _show(overhead, quality, skipped, Console())
    for title, head, lines in single:
        Console().print(_table(title, head, lines))
    if args.json:
        text = json.dumps(report.document(about, overhead, quality, skipped), indent=2) + "\n"
        Path(args.json).write_text(text, encoding="utf-8")
    if args.markdown:
        Path(args.markdown).write_text(report.markdown(about, overhead, quality, skipped), encoding="utf-8")
    failed = sum(row.failed for row in overhead) + sum(row.failed for row in quality)
    return 1 if failed else 0


_Single = tuple[str, Sequence[str], list[list[str]]]
_Made = tuple[dict[str, Any], list[report.OverheadRow], list[report.QualityRow], list[_Single], list[str]]


async def _main(args: argparse.Namespace, directory: Path, console: Console) -> _Made:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    venv = args.peers_venv or peers.setting(peers.SETTING)
    overhead: list[report.OverheadRow] = []
    quality: list[report.QualityRow] = []
    single: list[_Single] = []
    skipped: list[str] = []
    engines = ""
    with console.status("starting") as status:
        if args.only == "alone":
            single = await _alone(args, directory, status)
        if args.only == "beside":
            single = await _beside(args, directory, status)
        if args.only in (None, "overhead"):
            overhead, left_out = await _overhead(args, directory, venv, status)
            skipped += left_out
        if args.only in (None, "quality"):
            quality, left_out, engines = await _quality(args, directory, venv, status)
            skipped += left_out
    about = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "command": " ".join(["python -m loadtests.live", *sys.argv[1:]]),
        "engines": engines,
        "throughput_tool": throughput_tool(bench.FULL_OVERHEAD.concurrency),
    }
    return about, overhead, quality, single, list(dict.fromkeys(skipped))


async def _alone(args: argparse.Namespace, directory: Path, status: Status) -> list[_Single]:
    plan = alone.QUICK_ALONE if args.quick else alone.AlonePlan()
    if args.rounds:
        plan = replace(plan, rounds=args.rounds + 1)
    targets = [DIRECT, ENVOY, TRIVIAL, WARMROUTE]
    async with contextlib.AsyncExitStack() as stack:
        fleet = await start_trivial(stack, directory, 2)
        slices = await alone.alone(fleet, targets, plan, directory, status.update)
    found = alone.rows(slices, ENVOY.name, TRIVIAL.name)
    return [
        (
            f"One request at a time: prompts of {load.name}",
            alone.HEAD,
            [alone.cells(row) for row in found if row.load == load.name],
        )
        for load in plan.loads
    ]


async def _beside(args: argparse.Namespace, directory: Path, status: Status) -> list[_Single]:
    plan = beside.QUICK_BESIDE if args.quick else beside.BesidePlan()
    if args.rounds:
        plan = replace(plan, rounds=args.rounds)
    async with contextlib.AsyncExitStack() as stack:
        fleet = await start_trivial(stack, directory, 2)
        slices = await beside.beside(fleet, [TRIVIAL, WARMROUTE], plan, directory, status.update)
    lines = [beside.cells(row) for row in beside.rows(slices, plan.slice_s)]
    return [("Small requests beside a prompt of 1 MB", beside.HEAD, lines)]


async def _overhead(
    args: argparse.Namespace, directory: Path, venv: str | None, status: Status
) -> tuple[list[report.OverheadRow], list[str]]:
    plan = bench.QUICK_OVERHEAD if args.quick else bench.FULL_OVERHEAD
    if args.rounds:
        plan = bench.with_rounds(plan, args.rounds)
    targets = [DIRECT, ENVOY, TRIVIAL, WARMROUTE]
    targets += [target for policy in args.peer_policies for target in rust_targets(policy)]
    async with contextlib.AsyncExitStack() as stack:
        fleet = await start_trivial(stack, directory, 2)
        slices, outcome = await bench.overhead(fleet, targets, plan, directory, venv, status.update)
    rows = report.overhead_rows(slices, outcome.commands, DIRECT.name, ENVOY.name)
    return rows, outcome.skipped


async def _quality(
    args: argparse.Namespace, directory: Path, venv: str | None, status: Status
) -> tuple[list[report.QualityRow], list[str], str]:
    shape = QUICK if args.quick else FULL
    repetitions = args.repetitions or (1 if args.quick else 3)
    async with contextlib.AsyncExitStack() as stack:
        status.update(f"starting {args.engines} engines")
        fleet = await _fleet(args, stack, directory, shape)
        runs, outcome = await bench.quality(
            fleet,
            quality_targets(args.policies, args.peer_policies),
            shape,
            (args.workload,) if args.workload else WORKLOADS,
            repetitions,
            directory,
            venv,
            status.update,
            Path(args.decisions) if args.decisions else None,
            gateways_first=args.gateways_first,
        )
        command = fleet.engines[0].command
    rows = report.quality_rows(runs, outcome.commands, ROUND_ROBIN.name)
    engines = f"{args.engines} {fleet.kind} engines (`{command}`), medians of {repetitions}"
    return rows, outcome.skipped, engines


async def _fleet(
    args: argparse.Namespace, stack: contextlib.AsyncExitStack, directory: Path, shape: Shape
) -> Fleet:
    if args.engine == "simulated":
        blocks = shape.cache_tokens // _SIMULATED_BLOCK
        options = ["--num-gpu-blocks", str(blocks), "--max-num-seqs", "16", *SIMULATED_OPTIONS]
        return await start_simulated(stack, directory, args.engines, options, _SIMULATED_BLOCK)
    python = args.vllm_python or peers.setting("WARMROUTE_VLLM_PYTHON")
    if not python:
        raise WarmrouteError("name a Python that has vLLM with --vllm-python or WARMROUTE_VLLM_PYTHON")
    return await start_vllm(stack, directory, args.engines, python, shape.cache_tokens // 32)


def _show(
    overhead: Sequence[report.OverheadRow],
    quality: Sequence[report.QualityRow],
    skipped: Sequence[str],
    console: Console,
) -> None:
    for load in dict.fromkeys(row.load for row in overhead):
        cells = [report.overhead_cells(row) for row in overhead if row.load == load]
        console.print(_table(f"What a proxy costs: prompts of {load}", report.OVERHEAD_HEAD, cells))
    for workload in dict.fromkeys(row.workload for row in quality):
        cells = [report.quality_cells(row) for row in quality if row.workload == workload]
        console.print(_table(f"What routing saves: {workload}", report.QUALITY_HEAD, cells))
    for reason in skipped:
        console.print(f"skipped: {reason}", style="yellow", markup=False, soft_wrap=True)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    out = Table(title=title, title_justify="left")
    for number, name in enumerate(head):
        out.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        out.add_row(*row)
    return out


if __name__ == "__main__":
    sys.exit(main())
