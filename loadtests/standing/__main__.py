"""`python -m loadtests.standing`: every policy and peer at the knee of every workload, over several seeds."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from extproc.cli.simulate_jobs import peers
from extproc.core.errors import WarmrouteError
from extproc.sim.experiment import Load
from extproc.sim.policies import POLICIES
from loadtests.standing.cases import Traces
from loadtests.standing.compare import BOUND, Row, Setup, compare

_VARIANTS = ("token-load+first-token",)


def main() -> int:
    """The command."""
    args = _arguments()
    traces = Traces(args.agents, args.mooncake, args.azure)
    setup = Setup(traces, args.seeds, args.limit)
    known = setup.cases()
    names = args.cases or list(known)
    for name in names:
        if name not in known:
            raise WarmrouteError(f"no case is called {name!r}; choose from {', '.join(known)}")
    ours = [name for name in POLICIES if name not in _VARIANTS]
    others = list(peers())
    policies = args.policies or [*ours, *others]
    written = []
    for name, load, rows in compare(
        setup, names, policies, args.loads, args.jobs, lambda text: print(text, file=sys.stderr)
    ):
        _print(name, load, rows, others)
        written.append({"case": name, load.kind: load.value, "rows": [asdict(row) for row in rows]})
        if args.json is not None:
            args.json.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    return 0


def _print(name: str, load: Load, rows: list[Row], others: list[str]) -> None:
    best = min((row.middle_ms for row in rows if row.p99_ms and row.policy != BOUND), default=float("inf"))
    peer = min((row.middle_ms for row in rows if row.p99_ms and row.policy in others), default=float("inf"))
    print(f"\n### {name}, {load.kind} {load.value:g}\n")
    print("| policy | p99, ms | of the best | of the best peer | each run | cached | CV |")
    print("|---|--:|--:|--:|---|--:|--:|")
    for row in rows:
        if row.skipped is not None:
            print(f"| {row.policy} | skipped: {row.skipped} | | | | | |")
            continue
        each = ", ".join("-" if value is None else f"{value:,.0f}" for value in row.p99_ms)
        print(
            f"| {row.policy} | {row.middle_ms:,.0f} "
            f"| {row.middle_ms / best:.2f} | {row.middle_ms / peer:.2f} "
            f"| {each} | {row.cached:.1%} | {row.cv:.2f} |",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.standing",
        description="Whose p99 is lowest when the fleet is as loaded as it can be? The knee of each workload "
        "is found with the oracle, in a run that is not among those compared; then every policy runs there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--cases", type=_names, metavar="A,B,…", help="default: all")
    parser.add_argument(
        "--policies", type=_names, metavar="A,B,…", help="default: ours, the bound, and all peers"
    )
    parser.add_argument(
        "--seeds", type=_seeds, default=(1, 2, 3), metavar="A,B,…", help="of the compared runs"
    )
    parser.add_argument(
        "--loads",
        type=_loads,
        default={},
        metavar="CASE=KIND:VALUE,…",
        help="where the knee is known, such as documents=concurrency:32",
    )
    parser.add_argument("--agents", type=Path, metavar="FILE", help="the coding agent's sessions")
    parser.add_argument("--mooncake", type=Path, metavar="DIR", help="with Mooncake's traces")
    parser.add_argument("--azure", type=Path, metavar="FILE", help="Azure's trace")
    parser.add_argument("--limit", type=int, default=2000, metavar="N", help="requests of a run on a trace")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(seed) for seed in text.split(","))


def _loads(text: str) -> dict[str, Load]:
    loads = {}
    for item in _names(text):
        name, _, load = item.partition("=")
        kind, _, value = load.partition(":")
        if kind == "rate":
            loads[name] = Load("rate", float(value))
        elif kind == "concurrency":
            loads[name] = Load("concurrency", float(value))
        else:
            raise argparse.ArgumentTypeError(f"{item} is not CASE=rate:VALUE or CASE=concurrency:VALUE")
    return loads


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WarmrouteError as error:
        sys.exit(f"standing: {error}")
