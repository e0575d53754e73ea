"""`python -m loadtests.decisions`: decisions under load, by the router's own gRPC service.

A generator plays Envoy, in an open loop; there is no proxy and no engine, only 64 addresses that answer the
router's questions about metrics. Two kinds of load: sessions of 100,000 tokens that grow, and short prompts.
The same is asked of a trivial external processor in the same run, in turns: what any Python process costs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from extproc.adapters.child_process import ChildProcess
from extproc.adapters.envoy_process import EnvoyProcess
from extproc.core.errors import WarmrouteError
from extproc.demo.results import percentile
from extproc.prompt.tiny import tiny_model_path
from loadtests.decisions.workload import SHAPES, Shape
from loadtests.live.envoy_plain import trivial_engine
from loadtests.live.fleet import MODEL, line_of, trivial_answers
from loadtests.live.ports import ports_in_a_row
from loadtests.live.priority import descendants

_BLOCKS = 65_536  # of each worker: a million tokens
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Run:
    """One target under one load, once. Times in milliseconds; cores are processor time per second."""

    p50: float
    p95: float
    p99: float
    first_p50: float
    per_second: float
    cores: float
    generator_cores: float
    body_bytes: int
    failed: int


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m loadtests.decisions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--shape", choices=SHAPES, help="one of the loads")
    out.add_argument("--workers", type=int, default=64, metavar="N", help="1 to 250 (default: 64)")
    out.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each run (default: 10)")
    out.add_argument("--rounds", type=int, default=3, metavar="N", help="medians of so many (default: 3)")
    out.add_argument("--rate", type=float, metavar="R", help="requests per second, instead of the load's own")
    out.add_argument(
        "--processes", type=int, default=1, metavar="N", help="of the router (default: 1); asked in turn"
    )
    out.add_argument(
        "--threads",
        action="store_true",
        help="ask in turn also a router whose threads encode long prompts (`prompt_processes: 0`)",
    )
    out.add_argument("--json", metavar="FILE", help="write everything here")
    out.add_argument("--log", metavar="FILE", help="keep the router's log here")
    return out


async def workers(stack: contextlib.AsyncExitStack, directory: Path, count: int) -> list[str]:
    """So many addresses of one server that says what an idle engine says."""
    answers = trivial_answers()
    answers["/metrics"] = answers["/metrics"].replace('"4096"', f'"{_BLOCKS}"')
    config = trivial_engine(answers)
    config["static_resources"]["listeners"][0]["address"]["socket_address"]["address"] = "0.0.0.0"
    folder = directory / "engine"
    folder.mkdir()
    envoy = EnvoyProcess(config, folder, log_level="warning")
    await stack.enter_async_context(envoy)
    port = envoy.address.rpartition(":")[2]
    return [f"127.0.0.{number + 2}:{port}" for number in range(count)]


async def router(
    stack: contextlib.AsyncExitStack,
    directory: Path,
    endpoints: list[str],
    processes: int = 1,
    prompt_processes: int | None = None,
) -> tuple[ChildProcess, str]:
    """A router for these workers, as a user would run it, and its address, or one for each process."""
    listen, admin = ports_in_a_row(processes + 1), ports_in_a_row(processes + 1)
    config = {
        "listen": f"127.0.0.1:{listen}",
        "admin": {"listen": f"127.0.0.1:{admin}"},
        "processes": processes,
        "prompt_processes": prompt_processes,
        "decision_log": {"path": str(directory / "decisions.jsonl")},
        "pools": [
            {
                "model": {"path": str(tiny_model_path()), "names": [MODEL]},
                "block_size": 16,
                "kv_events": {"enabled": False},
                "discovery": {"static": [{"endpoint": endpoint} for endpoint in endpoints]},
            }
        ],
    }
    path = directory / "warmroute.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "extproc", "serve", "-c", str(path)]
    child = ChildProcess(command, directory / "router.log")
    if processes == 1:
        return await _listening(stack, child)
    await stack.enter_async_context(child)
    own = [f"127.0.0.1:{listen + 1 + number}" for number in range(processes)]
    for address in own:
        await line_of(child, partial(_says_listening, address))
    return child, ",".join(own)


def _says_listening(address: str, line: str) -> bool:
    return f"listening on {address}" in line


async def trivial(stack: contextlib.AsyncExitStack, directory: Path) -> tuple[ChildProcess, str]:
    """An external processor that decides nothing."""
    command = [sys.executable, "-m", "loadtests.live.trivial_processor"]
    return await _listening(stack, ChildProcess(command, directory / "trivial.log"))


async def _listening(stack: contextlib.AsyncExitStack, child: ChildProcess) -> tuple[ChildProcess, str]:
    await stack.enter_async_context(child)
    line = await line_of(child, lambda text: "listening on " in text)
    return child, line.rsplit(" ", 1)[1].strip()


async def measure(
    target: tuple[ChildProcess, str], key: str, args: argparse.Namespace, seed: int, *, tickets: bool
) -> Run:
    """One load on one target."""
    child, address = target
    plan = {
        "address": address,
        "shape": key,
        "rate": args.rate or SHAPES[key].rate,
        "seconds": args.seconds,
        "seed": seed,
        "tickets": tickets,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.decisions.generator"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        if not await process.stdout.readline():
            raise WarmrouteError(f"the generator ended before it began; the router says:\n{child.log_tail()}")
        await asyncio.sleep(1.0)  # what was put off is done, and the first requests have ended
        before = _cpu_s(child)
        process.stdin.write(b"begin\n")
        out: dict[str, Any] = json.loads(await process.stdout.readline() or b"{}")
        used = _cpu_s(child) - before
    finally:
        if process.returncode is None:
            process.stdin.close()
            await process.wait()
    if not out:
        raise WarmrouteError(f"the generator broke off; the router says:\n{child.log_tail()}")
    p50, p95, p99 = (percentile(out["times_ms"], share) or 0.0 for share in (0.50, 0.95, 0.99))
    rate = len(out["times_ms"]) / out["seconds"]
    first = statistics.median(out["first_ms"] or [0.0])
    cores = used / out["seconds"]
    return Run(p50, p95, p99, first, rate, cores, out["cores"], out["body_bytes"], out["failed"])


def _cpu_s(child: ChildProcess) -> float:
    """Of the process and all that it has started."""
    assert child.pid is not None
    ticks = 0
    for pid in {child.pid} | descendants(child.pid):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(") ", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


async def _main(args: argparse.Namespace, directory: Path, console: Console) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    with console.status("starting") as status:
        for key in [args.shape] if args.shape else SHAPES:
            async with contextlib.AsyncExitStack() as stack:
                folder = directory / key
                folder.mkdir()
                fleet = await workers(stack, folder, args.workers)
                theirs = await trivial(stack, folder)
                targets = {}
                for name, prompt_processes in (("Warmroute", None), ("Warmroute, threads", 0)):
                    if prompt_processes is None or args.threads:
                        own = folder / f"prompt-processes-{prompt_processes}"
                        own.mkdir()
                        targets[name] = await router(stack, own, fleet, args.processes, prompt_processes)
                ours = targets["Warmroute"]
                targets["trivial processor"] = theirs
                for round_number in range(args.rounds):
                    for name, target in targets.items():
                        status.update(f"{key}, round {round_number + 1} of {args.rounds}: {name}")
                        run = await measure(target, key, args, round_number, tickets=target is not theirs)
                        runs.setdefault(f"{key}/{name}", []).append(run)
                if args.log:
                    _keep(ours[0].log, args.log)
    return runs


def _keep(log: Path, where: str) -> None:
    Path(where).write_bytes(log.read_bytes())


def median(runs: list[Run]) -> Run:
    """Of each figure; failures add up."""
    figures = {
        name: statistics.median(getattr(run, name) for run in runs)
        for name in Run.__slots__
        if name != "failed"
    }
    return Run(**figures, failed=sum(run.failed for run in runs))


def table(shape: Shape, rows: dict[str, Run]) -> Table:
    """What was measured of one load."""
    out = Table(title=f"{shape.name}: p95 should stay below {shape.limit_ms:g} ms", title_justify="left")
    heads = ("", "p50, ms", "p95", "p99", "first p50", "req/s", "cores", "generator's", "body, KB", "failed")
    for number, head in enumerate(heads):
        out.add_column(head, justify="right" if number else "left")
    for name, run in rows.items():
        cells = (run.p50, run.p95, run.p99, run.first_p50)
        out.add_row(
            name,
            *(f"{cell:.1f}" for cell in cells),
            f"{run.per_second:.0f}",
            f"{run.cores:.2f}",
            f"{run.generator_cores:.2f}",
            f"{run.body_bytes / 1000:.0f}",
            str(run.failed),
        )
    return out


def main() -> int:
    """Run. Exit code 1 where a request failed."""
    args = parser().parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="warmroute-decisions-", ignore_cleanup_errors=True) as folder:
        try:
            runs = asyncio.run(_main(args, Path(folder), console))
        except WarmrouteError as error:
            console.print(str(error), style="red", markup=False)
            return 1
    medians = {name: median(taken) for name, taken in runs.items()}
    for key, shape in SHAPES.items():
        rows = {name.partition("/")[2]: run for name, run in medians.items() if name.startswith(f"{key}/")}
        if rows:
            Console().print(table(shape, rows))
    if args.json:
        plain = {
            name: [{field: getattr(run, field) for field in Run.__slots__} for run in taken]
            for name, taken in runs.items()
        }
        Path(args.json).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    return 1 if any(run.failed for run in medians.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
