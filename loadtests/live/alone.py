"""One client, one request at a time: what asking costs when nothing else is going on.

Targets take turns in short slices, in an order that shifts, so that what else the machine does meets all of
them. Added latency is above Envoy alone in the same round; the ratio is that of the medians.
"""

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from loadtests.live.fleet import MODEL, Fleet
from loadtests.live.http1 import Connection
from loadtests.live.load import request_bytes
from loadtests.live.schedule import LOADS, Load, fill, latency, rotated, templates
from loadtests.live.targets import Target, running

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class AloneRow:
    """One target under one load: medians over slices, milliseconds. `added_ms` is above Envoy alone.

    `ratio` is what was added, against what the trivial processor added. None: nothing to compare with.
    """

    target: str
    load: str
    p50_ms: float
    p95_ms: float
    added_ms: float | None
    ratio: float | None
    requests: int
    failed: int


@dataclass(frozen=True, slots=True)
class AlonePlan:
    """Slices per target, seconds each, and the loads."""

    rounds: int = 12
    slice_s: float = 1.0
    loads: tuple[Load, ...] = LOADS


QUICK_ALONE = AlonePlan(rounds=2, slice_s=0.3, loads=tuple(load for load in LOADS if load.size == "2 KB"))


async def alone(
    fleet: Fleet, targets: Sequence[Target], plan: AlonePlan, directory: Path, say: Say
) -> dict[tuple[str, str], list[list[float]]]:
    """Latencies in milliseconds by load and target, a list for each slice; failed requests are infinite."""
    slices: dict[tuple[str, str], list[list[float]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        up: dict[str, str] = {}
        for target in targets:
            say(f"starting {target.name}")
            up[target.name] = (
                await stack.enter_async_context(running(target, fleet, directory, None))
            ).address
        numbers = itertools.count(1)
        for load in plan.loads:
            made = templates(load, 16, MODEL, Random(1))
            for round_number in range(plan.rounds):
                for name in rotated(list(up), round_number):
                    say(f"{load.name}, round {round_number + 1} of {plan.rounds}: {name}")
                    times = await _slice(up[name], made, numbers, plan.slice_s)
                    if round_number:  # the first only warms up
                        slices.setdefault((load.name, name), []).append(times)
    return slices


async def _slice(
    address: str, made: Sequence[tuple[bytes, bytes]], numbers: "itertools.count[int]", seconds: float
) -> list[float]:
    connection = Connection(address)
    times: list[float] = []
    gc.collect()
    gc.disable()  # a collection here would be charged to the target
    try:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            number = next(numbers)
            request = request_bytes(address, fill(made[number % len(made)], number))
            answer = await connection.request(request)
            took_ms = (answer.ended_at - answer.sent_at) * 1000.0
            times.append(took_ms if answer.status == 200 else float("inf"))
    finally:
        gc.enable()
        connection.close()
    return times


def rows(slices: dict[tuple[str, str], list[list[float]]], envoy: str, trivial: str) -> list[AloneRow]:
    """What was measured, by load and target, in their order."""
    found = {key: _medians(taken) for key, taken in slices.items()}
    out = []
    for (load, target), (p50, p95) in found.items():
        base, price = found.get((load, envoy)), found.get((load, trivial))
        added = None if base is None else p50 - base[0]
        ratio = None
        if base is not None and price is not None and added is not None and price[0] > base[0]:
            ratio = added / (price[0] - base[0])
        times = [time for one in slices[load, target] for time in one]
        failed = sum(time == float("inf") for time in times)
        out.append(AloneRow(target, load, p50, p95, added, ratio, len(times), failed))
    return out


def _medians(slices: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Median over slices of their 50th and 95th percentiles."""
    taken = [one for times in slices if (one := latency(times, 0)) is not None]
    return statistics.median(one.p50 for one in taken), statistics.median(one.p95 for one in taken)


HEAD = ("target", "p50, ms", "p95, ms", "added p50, ms", "of the trivial processor's", "failed")


def cells(row: AloneRow) -> list[str]:
    """One row as text, under `HEAD`."""
    return [
        row.target,
        f"{row.p50_ms:.2f}",
        f"{row.p95_ms:.2f}",
        "-" if row.added_ms is None else f"{row.added_ms:+.2f}",
        "-" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.failed} of {row.requests}" if row.failed else "0",
    ]
