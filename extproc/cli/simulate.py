"""`warmroute simulate`: policies and peers on a simulated fleet, in one run."""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from extproc import __version__
from extproc.core.errors import WarmrouteError

if TYPE_CHECKING:
    from rich.console import Console

    from extproc.cli.simulate_jobs import Job, Outcome
    from extproc.sim.experiment import Load
    from extproc.sim.fleet import FleetSettings

_PIPE_WIDTH = 120

HELP = "Simulate a fleet: how each routing policy serves a workload, beside its peers and a bound."

_EVERYTHING = "all"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = "Deterministic: the same options give the same JSON, byte for byte."
    parser.add_argument("--list", action="store_true", help="show workloads, policies and presets")
    _load_options(parser.add_argument_group("what is asked"))
    _fleet_options(parser.add_argument_group("the fleet"))
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    out.add_argument("--html", type=Path, metavar="FILE", help="write tables and charts, in one file")
    out.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to use")
    out.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Simulate.

    Raises:
        WarmrouteError: the options contradict each other, or a name is unknown.
    """
    # Imported here, so that --help is fast.
    from rich.console import Console

    from extproc.cli.simulate_jobs import run_jobs
    from extproc.cli.simulate_table import results_table
    from extproc.sim.report_html import html_report
    from extproc.sim.results import report_of

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
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
    for policy, reason in skipped.items():
        console.print(f"skipped {policy}: {reason}", markup=False)
    if args.json is not None:
        about_json = {**about, "skipped": skipped}
        report = report_of(results, about_json, args.knee_ttft_ms)
        _write(args.json, json.dumps(report, indent=1) + "\n")
    if args.html is not None:
        _write(args.html, html_report(about, results, args.knee_ttft_ms, command(args)))
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
    settings = _settings(args, WORKLOADS[args.workload](options).block_size)
    knee = args.knee_ttft_ms if args.knee else None
    if knee is not None:
        if loads == [None]:
            raise WarmrouteError("--knee needs the load to begin with: give --rate or --concurrency")
        loads = loads[:1]
    return [
        Job(args.workload, options, policy, settings, load, knee) for load in loads for policy in policies
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
        "version": __version__,
    }


def command(args: argparse.Namespace) -> str:
    """The command line that gives the same figures."""
    words = ["warmroute", "simulate"]
    for name in _REPRODUCING:
        value = getattr(args, name)
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            shown = ",".join(f"{v:g}" for v in value) if isinstance(value, list) else str(value)
            words += [flag, shown]
    return shlex.join(words)


_REPRODUCING = (
    *("workload", "trace", "part", "window", "limit", "policies", "rate", "concurrency", "knee"),
    *(
        "knee_ttft_ms",
        "seed",
        "warmup",
        "replicas",
        "preset",
        "kv_tokens",
        "max_num_seqs",
        "scrape_interval",
        "network_ms",
    ),
    *("kv_delay_ms", "kv_loss", "no_kv_events", "no_kv_replay"),
)


def _load_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", default="rl-rollouts", metavar="NAME", help="see --list")
    group.add_argument("--trace", type=Path, metavar="PATH", help="replay this instead of a stand-in")
    group.add_argument("--part", metavar="I/N", help="only part I, from 0, of N of the trace, such as 0/3")
    group.add_argument("--window", metavar="A:B", help="only what the trace has in these seconds")
    group.add_argument("--limit", type=int, metavar="N", help="stop the workload after about N requests")
    group.add_argument(
        "--policies",
        default="token-load,least-load,round-robin,oracle",
        metavar="A,B,…",
        help=f"of ours, of peers (see --list), or module:factory; {_EVERYTHING}: every one there is",
    )
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--rate", type=_numbers, metavar="R,…", help="open loop: sessions per second; several are run in turn"
    )
    load.add_argument(
        "--concurrency", type=_wholes, metavar="C,…", help="closed loop: sessions at once; several likewise"
    )
    group.add_argument("--knee", action="store_true", help="raise the load until the fleet does not cope")
    group.add_argument(
        "--knee-ttft-ms", type=float, default=2000.0, metavar="MS", help="coping: TTFT p95 within this"
    )
    group.add_argument("--seed", type=int, default=0, help="of everything random")
    group.add_argument("--warmup", type=int, default=0, metavar="N", help="first requests, not measured")


def _fleet_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--replicas", type=int, default=4, metavar="N", help="engines")
    group.add_argument("--preset", default="medium", metavar="NAME", help="how fast they are; see --list")
    group.add_argument("--kv-tokens", type=int, metavar="N", help="KV cache of each (default: the preset's)")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="sequences in one batch")
    group.add_argument(
        "--scrape-interval", type=float, default=1.0, metavar="S", help="seconds between metrics scrapes"
    )
    group.add_argument(
        "--network-ms", type=float, default=0.5, metavar="MS", help="router to engine, one way"
    )
    group.add_argument("--kv-delay-ms", type=float, default=1.0, metavar="MS", help="age of KV events")
    group.add_argument("--kv-loss", type=float, default=0.0, metavar="SHARE", help="KV event batches lost")
    group.add_argument("--no-kv-events", action="store_true", help="engines publish no KV events")
    group.add_argument("--no-kv-replay", action="store_true", help="lost KV events stay lost")


def _settings(args: argparse.Namespace, block_size: int) -> "FleetSettings":
    from extproc.sim.fleet import FleetSettings
    from extproc.sim.hardware import ENGINE_PRESETS

    preset = ENGINE_PRESETS.get(args.preset)
    if preset is None:
        raise WarmrouteError(f"no preset is called {args.preset!r}; choose from {', '.join(ENGINE_PRESETS)}")
    if args.kv_tokens is not None:
        preset = dataclasses.replace(preset, kv_tokens=args.kv_tokens)
    return FleetSettings(
        replicas=args.replicas,
        engine=preset.engine(block_size, max_num_seqs=args.max_num_seqs),
        network_s=args.network_ms / 1000.0,
        scrape_interval_s=args.scrape_interval,
        kv_delay_s=args.kv_delay_ms / 1000.0,
        kv_events=not args.no_kv_events,
        kv_loss=args.kv_loss,
        kv_replay=not args.no_kv_replay,
        warmup_requests=args.warmup,
        seed=args.seed,
    )


def _policies(text: str) -> list[str]:
    from extproc.cli.simulate_jobs import peers
    from extproc.sim.policies import POLICIES

    if text == _EVERYTHING:
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


def _numbers(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not values or not all(value > 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text} is not a list of numbers above 0")
    return values


def _wholes(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if not all(value > 0 for value in values):
        raise argparse.ArgumentTypeError(f"{text} is not a list of whole numbers above 0")
    return values


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise WarmrouteError(f"cannot write {path}: {error.strerror}") from None


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
