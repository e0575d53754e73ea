"""`python -m loadtests.restarts`: what a rolling restart of both routers costs under load.

Two linked `warmroute serve` behind one Envoy, in front of simulated engines that hold a third of the prompts
each. Under a steady open loop of questions on documents and growing chats, after a control without a restart,
the routers are restarted: one after the other (rolling), the second as soon as the first listens (quick), and
both at once (together), when nobody is left to hand over what is known. That one is not judged: it shows that
a loss would be seen. Cached tokens are what the engines say in their usage.

Exit codes: 0 all is as it should be; 1 a request failed, or the share of cached tokens was more than 5
points below the control's for 10 seconds or longer; 2 nothing could be measured, or chance alone moves the
share so far.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import math
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from extproc.core.errors import WarmrouteError
from loadtests.live.fleet import MODEL, start_simulated
from loadtests.restarts import report as reports
from loadtests.restarts.play import SCENARIOS, Load, Plan, play
from loadtests.restarts.routers import Routers
from loadtests.restarts.workload import FULL, QUICK, Shape, bodies

BLOCK_SIZE = 16
SPEED = ("--prefill-tokens-per-s", "12000", "--step-ms", "4", "--attention-ms-per-pair", "2.5e-6")
FULL_PLAN = Plan(rounds=3, warm_up_s=60.0, control_s=40.0, steady_s=20.0, rate=12.0)
QUICK_PLAN = Plan(rounds=1, warm_up_s=2.0, control_s=4.0, steady_s=2.0, rate=12.0)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m loadtests.restarts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--quick", action="store_true", help="small sizes: does it work, not what is lost")
    out.add_argument(
        "--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="default: all, after a control"
    )
    out.add_argument("--rounds", type=_count, metavar="N", help="of everything (default: 3)")
    out.add_argument("--rate", type=_above_0, metavar="R", help="requests per second (default: 12)")
    out.add_argument("--steady", type=_above_0, metavar="S", help="seconds after a restart (default: 20)")
    out.add_argument("--control", type=_above_0, metavar="S", help="seconds without one (default: 40)")
    out.add_argument("--engines", type=_count, default=4, metavar="N", help="default: 4")
    out.add_argument("--seed", type=int, default=1, metavar="N", help="of texts and times (default: 1)")
    out.add_argument("--cache-tokens", type=_count, metavar="N", help="what an engine holds (default: 42000)")
    out.add_argument(
        "--message-timeout",
        type=_above_0,
        metavar="S",
        help="how long Envoy waits for a router",
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="write everything here")
    out.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    out.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and decisions in this new folder")
    return out


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _above_0(text: str) -> float:
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def plan_of(args: argparse.Namespace) -> tuple[Plan, Shape]:
    """What the options ask for."""
    plan, shape = (QUICK_PLAN, QUICK) if args.quick else (FULL_PLAN, FULL)
    made = Plan(
        rounds=args.rounds or plan.rounds,
        warm_up_s=plan.warm_up_s,
        control_s=args.control or plan.control_s,
        steady_s=args.steady or plan.steady_s,
        rate=args.rate or plan.rate,
        scenarios=tuple(dict.fromkeys(args.scenarios)),
    )
    return made, replace(shape, cache_tokens=args.cache_tokens or shape.cache_tokens)


def main() -> int:
    """Run."""
    args = parser().parse_args()
    console = Console(stderr=True)
    try:
        with _folder(args.keep) as directory:
            made = asyncio.run(_main(args, directory, console))
    except asyncio.CancelledError:
        console.print("interrupted; everything that was started has been stopped")
        return 130
    except (WarmrouteError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    about = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "command": " ".join(["python -m loadtests.restarts", *sys.argv[1:]]),
        "load_average": os.getloadavg(),
    }
    _show(made, Console())
    if args.json is not None:
        args.json.write_text(json.dumps(reports.document(about, made), indent=2) + "\n", encoding="utf-8")
    if args.markdown is not None:
        args.markdown.write_text(reports.markdown(about, made), encoding="utf-8")
    return exit_code(made)


def exit_code(made: reports.Report) -> int:
    """See the module's docstring."""
    if made.failed:
        return 1
    if not made.noise.enough:
        return 2
    return 0 if made.kept else 1


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="warmroute-restarts-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


async def _main(args: argparse.Namespace, directory: Path, console: Console) -> reports.Report:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    plan, shape = plan_of(args)
    options = ["--num-gpu-blocks", str(shape.cache_tokens // BLOCK_SIZE), "--max-num-seqs", "16", *SPEED]
    async with contextlib.AsyncExitStack() as stack:
        status = stack.enter_context(console.status(f"starting {args.engines} engines"))
        fleet = await start_simulated(stack, directory, args.engines, options, BLOCK_SIZE)
        status.update("starting two routers and Envoy")
        routers = await stack.enter_async_context(Routers(fleet, directory, args.message_timeout))

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        load = Load(routers.address, bodies(shape, MODEL, args.seed), plan.rate, args.seed)
        runs = await play(routers, load, plan, say)
        await routers.logged(list(load.sent)[-20:])
        return reports.report(load, runs, routers.decided())


def _show(made: reports.Report, console: Console) -> None:
    table = Table(title="Cached tokens while routers are restarted", title_justify="left")
    for number, name in enumerate(reports.HEAD):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in made.rows:
        table.add_row(*reports.cells(row))
    console.print(table)
    console.print(reports.HEAD_TEXT, highlight=False)
    console.print(reports.noise_text(made.noise), highlight=False)
    console.print("percent of cached tokens, second by second; | is the first stop:", highlight=False)
    for row in made.rows:
        console.print(reports.seconds_text(row), highlight=False, soft_wrap=True)
    for text in made.failures[:10]:
        console.print(text, style="red", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
