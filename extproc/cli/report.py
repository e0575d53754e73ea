"""`warmroute report`: decision logs, compared by rollout mode."""

import argparse
import json
import sys

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from extproc.adapters.log_files import LogFile
from extproc.analysis.mode_report import WARMTHS, Group, ModeReport

HELP = "compare what observe, shadow and enforce gave to warm, partial and cold requests, from decision logs"
_STEP = 1000  # lines between two looks of the progress bar


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "logs", nargs="+", metavar="LOG", help="decision log, plain or packed; `-` reads stdin"
    )
    parser.add_argument("--pool", metavar="NAME", help="only requests of this pool")
    parser.add_argument("--tenant", metavar="NAME", help="only requests of this tenant")
    parser.add_argument("--class", dest="traffic_class", metavar="NAME", help="only this traffic class")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when the logs tell of no finished request."""
    report = ModeReport(args.pool, args.tenant, args.traffic_class)
    for name in args.logs:
        _read(LogFile(name), report)
    if args.json:
        json.dump(report.as_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        _show(report)
    return 0 if report.groups else 1


def _read(log: LogFile, report: ModeReport) -> None:
    """Count every line, with a bar on the terminal."""
    columns = (
        TextColumn(log.name),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("read", total=log.size)
        for number, line in log.lines():
            try:
                report.add(msgspec.json.decode(line))
            except (msgspec.MsgspecError, RecursionError):
                report.foreign += 1
            if number % _STEP == 0:
                progress.update(task, completed=log.position)
    for problem in log.problems:
        print(f"warmroute report: {log.name}: {problem}", file=sys.stderr)


def _show(report: ModeReport) -> None:
    console = Console(highlight=False)
    if not report.groups:
        console.print("no finished request in these logs")
    else:
        console.print(_table(report))
        console.print(
            "ttft, queue: ms, 50 / 90 (/ 99) of 100 requests stay within; queue and ours: as predicted; "
            "evicted: blocks that left the worker's GPU while a request ran, on average.",
            style="dim",
        )
    for count, what in (
        (report.unfinished, "requests that did not finish"),
        (report.foreign, "lines that are none of a decision log"),
    ):
        if count:
            console.print(f"left out: {count} {what}")


def _table(report: ModeReport) -> Table:
    table = Table("mode", "requests of", box=None, header_style="bold")
    for column in ("requests", "ttft", "queue", "evicted", "cached", "ours"):
        table.add_column(column, justify="right")
    for mode in report.modes():
        for warm in WARMTHS:
            if (mode, warm) in report.groups:
                table.add_row(mode, warm, *_cells(report.groups[mode, warm]))
        table.add_row(mode, "all", *_cells(report.total(mode)), style="bold", end_section=True)
    return table


def _cells(group: Group) -> tuple[str, ...]:
    figures = group.figures()

    def times(*keys: str) -> str:
        return " / ".join("-" if (value := figures[key]) is None else f"{value:,.0f}" for key in keys)

    def share(key: str) -> str:
        value = figures[key]
        return "-" if value is None else f"{100 * value:.1f} %"

    evicted = figures["evicted_blocks"]
    return (
        f"{group.requests:,}",
        times("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"),
        times("queue_p50_ms", "queue_p90_ms"),
        "-" if evicted is None else f"{evicted:,.1f}",
        share("cached_share"),
        share("ours_share"),
    )
