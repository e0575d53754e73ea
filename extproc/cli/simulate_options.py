"""Options of `warmroute simulate`: what is asked, of which fleet, and the command line that says it again."""

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from extproc.cli.option_types import listed, whole
from extproc.core.errors import WarmrouteError

if TYPE_CHECKING:
    from extproc.sim.fleet import FleetSettings
    from extproc.sim.routing import HoldFacts

EVERYTHING = "all"
"""Stands for every policy there is."""

_numbers = listed(float, lambda value: value > 0, "numbers above 0")
_times = listed(float, lambda value: value >= 0, "numbers from 0 on")
_wholes = listed(int, lambda value: value > 0, "whole numbers above 0")


def load_options(group: argparse._ArgumentGroup) -> None:
    """Add what is asked of the fleet."""
    group.add_argument("--workload", default="rl-rollouts", metavar="NAME", help="see --list")
    group.add_argument("--trace", type=Path, metavar="PATH", help="replay this instead of a stand-in")
    group.add_argument("--part", metavar="I/N", help="only part I, from 0, of N of the trace, such as 0/3")
    group.add_argument("--window", metavar="A:B", help="only what the trace has in these seconds")
    group.add_argument("--limit", type=whole, metavar="N", help="stop the workload after about N requests")
    group.add_argument(
        "--policies",
        default="token-load,least-load,round-robin,oracle",
        metavar="A,B,…",
        help=f"of ours, of peers (see --list), or module:factory; {EVERYTHING}: every one there is",
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


def fleet_options(group: argparse._ArgumentGroup) -> None:
    """Add what the fleet is."""
    group.add_argument("--replicas", type=int, default=4, metavar="N", help="engines")
    group.add_argument("--preset", default="medium", metavar="NAME", help="how fast they are; see --list")
    group.add_argument("--kv-tokens", type=int, metavar="N", help="KV cache of each (default: the preset's)")
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="sequences in one batch")
    group.add_argument(
        "--routers",
        type=_wholes,
        default=[1],
        metavar="N,…",
        help="routers that share the requests; 1,2: both",
    )
    group.add_argument(
        "--exchange-ms",
        type=_times,
        default=[50.0],
        metavar="MS,…",
        help="several routers tell each other their load so often; 0: never",
    )
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
    hold = "policies with +admission: "
    group.add_argument(
        "--admission-queue-ms",
        type=float,
        metavar="MS",
        help=f"{hold}queue of a worker that is full (default: as in the configuration)",
    )
    group.add_argument(
        "--admission-wait-s", type=float, metavar="S", help=f"{hold}longest wait (default: likewise)"
    )
    group.add_argument(
        "--admission-requests", type=int, metavar="N", help=f"{hold}most that wait (default: likewise)"
    )
    group.add_argument(
        "--priorities", metavar="T=N,…", help=f"{hold}priorities of tenants, higher first (default: 0)"
    )


def fleet_settings(args: argparse.Namespace, block_size: int) -> "FleetSettings":
    """The fleet that the options describe, for a workload with blocks of `block_size` tokens.

    Raises:
        WarmrouteError: a name is unknown, or a list of priorities is none.
        ValueError: a value is out of range.
    """
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
        hold=_hold(args),
    )


def _hold(args: argparse.Namespace) -> "HoldFacts":
    from extproc.sim.routing import HoldFacts

    facts = HoldFacts(priorities=_priorities(args.priorities))
    if args.admission_queue_ms is not None:
        facts = dataclasses.replace(
            facts, room=dataclasses.replace(facts.room, max_queue_ms=args.admission_queue_ms)
        )
    if args.admission_wait_s is not None:
        facts = dataclasses.replace(facts, max_wait_s=args.admission_wait_s)
    if args.admission_requests is not None:
        facts = dataclasses.replace(
            facts, queue=dataclasses.replace(facts.queue, max_requests=args.admission_requests)
        )
    return facts


def _priorities(text: str | None) -> dict[str, int]:
    found = {}
    for part in filter(None, (text or "").split(",")):
        tenant, _, number = part.partition("=")
        try:
            found[tenant.strip()] = int(number)
        except ValueError:
            raise WarmrouteError(f"--priorities: {part!r} is not TENANT=NUMBER") from None
    return found


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
    *("routers", "exchange_ms"),
    *("kv_delay_ms", "kv_loss", "no_kv_events", "no_kv_replay"),
    *("admission_queue_ms", "admission_wait_s", "admission_requests", "priorities"),
)
