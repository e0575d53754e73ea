"""`warmroute simulate`: policies and peers on a simulated fleet, in one run."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from extproc import __version__
from extproc.cli.option_types import whole
from extproc.cli.output_files import STANDARD_OUTPUT, check_writable, write_text
from extproc.cli.simulate_options import EVERYTHING, command, fleet_options, fleet_settings, load_options
from extproc.core.errors import WarmrouteError

if TYPE_CHECKING:
    from rich.console import Console

    from extproc.cli.simulate_jobs import Job, Outcome
    from extproc.sim.experiment import Load
    from extproc.sim.fleet import FleetSettings

_PIPE_WIDTH = 120

HELP = "simulate a fleet: how each routing policy serves a workload, beside its peers and a bound"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = "Deterministic: the same options give the same JSON, byte for byte (dynamo excepted)."
    parser.add_argument("--list", action="store_true", help="show workloads, policies and presets")
    load_options(parser.add_argument_group("what is asked"))
    fleet_options(parser.add_argument_group("the fleet"))
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", metavar="FILE", help="write the figures (-: standard output, nothing else)")
    out.add_argument("--html", metavar="FILE", help="write tables and charts, in one file")
    out.add_argument("--jobs", type=whole, default=1, metavar="N", help="processes to use")
    out.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Simulate.

    Raises:
        WarmrouteError: the options contradict each other, or a name is unknown.
    """
    # Imported here, so that --help is fast.
    from rich.console import Console

    from extproc.cli.simulate_jobs import run_jobs
    from extproc.cli.simulate_table import LEGEND, knee_lines, results_table
    from extproc.sim.report_html import html_report
    from extproc.sim.results import report_of

    for option, name in (("--json", args.json), ("--html", args.html)):
        check_writable(option, name)
    beside = STANDARD_OUTPUT in (args.json, args.html)  # the table goes to standard error then
    console = Console(stderr=beside)
    if not console.is_terminal:
        console = Console(stderr=beside, width=_PIPE_WIDTH)
    if args.list:
        _print_list(console)
        return 0
    try:
        jobs = plan(args)
    except ValueError as error:
        raise WarmrouteError(str(error)) from None
    outcomes: list[tuple[int, Outcome]] = []
    with _Bars(jobs, shown=not args.quiet) as bars:
        for index, outcome in run_jobs(jobs, args.jobs, bars.update):
            outcomes.append((index, outcome))
            bars.done(index)
    ended = [outcome for _, outcome in sorted(outcomes, key=lambda pair: pair[0])]
    results = [result for outcome in ended for result in outcome.results]
    skipped = {outcome.job.policy: outcome.skipped for outcome in ended if outcome.skipped is not None}
    about = describe(args, jobs[0].settings)
    console.print(results_table(results))
    console.print(LEGEND, style="dim", highlight=False)
    for line in knee_lines(results, args.knee_ttft_ms):
        console.print(line, markup=False, highlight=False)
    for policy, reason in skipped.items():
        console.print(f"skipped {policy}: {reason}", markup=False)
    if args.json is not None:
        about_json = {**about, "skipped": skipped}
        report = report_of(results, about_json, args.knee_ttft_ms)
        write_text(args.json, json.dumps(report, indent=1) + "\n")
    if args.html is not None:
        write_text(args.html, html_report(about, results, args.knee_ttft_ms, command(args)))
    return 0 if results else 1


def plan(args: argparse.Namespace) -> "list[Job]":
    """One job per policy and load.

    Raises:
        WarmrouteError: a name is unknown.
        ValueError: a value is out of range.
    """
    from extproc.adapters.traces import part_of, read_lines, window_of
    from extproc.cli.simulate_jobs import Job, policy_maker
    from extproc.sim.sessions import WorkloadOptions
    from extproc.sim.workloads import WORKLOADS

    if args.workload not in WORKLOADS:
        raise WarmrouteError(f"no workload is called {args.workload!r}; choose from {', '.join(WORKLOADS)}")
    policies = _policies(args.policies)
    for policy in policies:
        policy_maker(policy)
    loads = _loads(args)
    if args.trace is None and (args.part is not None or args.window is not None):
        raise WarmrouteError("--part and --window choose from a trace: give --trace")
    options = WorkloadOptions(
        seed=args.seed,
        trace=args.trace,
        limit=args.limit,
        part=None if args.part is None else part_of(args.part),
        window_s=None if args.window is None else window_of(args.window),
        read_lines=read_lines,
    )
    settings = fleet_settings(args, WORKLOADS[args.workload](options).block_size)
    knee = args.knee_ttft_ms if args.knee else None
    if knee is not None:
        if loads == [None]:
            raise WarmrouteError("--knee needs the load to begin with: give --rate or --concurrency")
        loads = loads[:1]
    fronts = [
        (routers, exchange_ms)
        for routers in args.routers
        for exchange_ms in (args.exchange_ms if routers > 1 else (0.0,))
    ]
    return [
        Job(args.workload, options, policy, settings, load, knee, routers, exchange_ms)
        for load in loads
        for policy in policies
        for routers, exchange_ms in fronts
    ]


def describe(args: argparse.Namespace, settings: "FleetSettings") -> dict[str, Any]:
    """What was simulated, for reports."""
    engine = settings.engine
    return {
        "workload": args.workload,
        "trace": None if args.trace is None else args.trace.name,
        "part": args.part,
        "window": args.window,
        "limit": args.limit,
        "replicas": settings.replicas,
        "seed": args.seed,
        "preset": args.preset,
        "engine": {
            "block_size": engine.block_size,
            "num_gpu_blocks": engine.num_gpu_blocks,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_model_len": engine.max_model_len,
            **dataclasses.asdict(engine.time),
        },
        "scrape_interval_s": settings.scrape_interval_s,
        "network_s": settings.network_s,
        "kv_delay_s": settings.kv_delay_s,
        "kv_events": settings.kv_events,
        "kv_loss": settings.kv_loss,
        "kv_replay": settings.kv_replay,
        "warmup_requests": settings.warmup_requests,
        "routers": args.routers,
        "exchange_ms": args.exchange_ms,
        "version": __version__,
    }


def _policies(text: str) -> list[str]:
    from extproc.cli.simulate_jobs import peers
    from extproc.sim.policies import POLICIES

    if text == EVERYTHING:
        return list({**POLICIES, **peers()})
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise WarmrouteError("--policies names none; see --list")
    return names


def _loads(args: argparse.Namespace) -> "list[Load | None]":
    from extproc.sim.experiment import Load

    if args.rate is not None:
        return [Load("rate", value) for value in args.rate]
    if args.concurrency is not None:
        return [Load("concurrency", value) for value in args.concurrency]
    return [None]


class _Bars:
    """A progress bar per job under way."""

    def __init__(self, jobs: "Sequence[Job]", *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} requests"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not shown,
            transient=True,
        )
        self._tasks = [
            self._progress.add_task(job.title, total=job.options.limit, start=False, visible=False)
            for job in jobs
        ]

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, index: int, ended: int) -> None:
        """Requests that a job has ended."""
        task = self._tasks[index]
        self._progress.start_task(task)
        self._progress.update(task, completed=ended, visible=True)

    def done(self, index: int) -> None:
        """A job is over."""
        self._progress.update(self._tasks[index], visible=False)


def _print_list(console: "Console") -> None:
    from extproc.cli.simulate_jobs import peers
    from extproc.sim.hardware import ENGINE_PRESETS
    from extproc.sim.policies import POLICIES
    from extproc.sim.workloads import WORKLOADS

    console.print("workloads", style="bold")
    for name, make in WORKLOADS.items():
        console.print(f"  {name:24}{(make.__doc__ or '').strip().splitlines()[0]}", markup=False)
    console.print("policies", style="bold")
    console.print(f"  ours and bounds: {', '.join(POLICIES)}", markup=False)
    found = ", ".join(peers()) or "none here; they are part of a checkout (loadtests/peers)"
    console.print(f"  peers: {found}", markup=False)
    console.print("presets", style="bold")
    for name, preset in ENGINE_PRESETS.items():
        console.print(f"  {name:24}{preset.kv_tokens:,} KV tokens; {preset.source}", markup=False)
