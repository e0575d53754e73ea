"""Small requests with and without a big one under way: how long does a prompt of 1 MB hold the others up?

The big ones come from a process of their own, one at a time, each text new, so that one is always under way.
Slices with and without them alternate, the same for every target; small requests leave in an open loop. What
the trivial processor suffers is the price of moving the bytes; the rest is the router's.
"""

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from extproc.demo.results import percentile
from extproc.demo.workload import prose
from loadtests.live.fleet import MODEL, Fleet
from loadtests.live.http1 import Connection
from loadtests.live.load import open_loop, request_bytes
from loadtests.live.schedule import LOADS, arrivals, fill, rotated, templates
from loadtests.live.targets import Target, running

Say = Callable[[str], None]

BIG_BYTES = 1 << 20
_PIECES = 512


@dataclass(frozen=True, slots=True)
class BesidePlan:
    """Slices of each kind, seconds each, and small requests per second."""

    rounds: int = 5
    slice_s: float = 4.0
    rate: float = 60.0


QUICK_BESIDE = BesidePlan(rounds=1, slice_s=1.0)


@dataclass(frozen=True, slots=True)
class Slice:
    """Latencies of small requests without and with a big one; big ones that were answered; failures."""

    without_ms: list[float]
    beside_ms: list[float]
    big: int
    failed: int


@dataclass(frozen=True, slots=True)
class BesideRow:
    """One target, over all slices. Milliseconds; `added_p99_ms` is the median of the rounds' differences."""

    target: str
    p50_ms: float
    p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    added_p99_ms: float
    big_per_s: float
    requests: int
    failed: int


async def beside(
    fleet: Fleet, targets: Sequence[Target], plan: BesidePlan, directory: Path, say: Say
) -> dict[str, list[Slice]]:
    """Slices by target."""
    small = next(load for load in LOADS if load.name == "2 KB, unique")
    made = templates(small, 16, MODEL, Random(1))
    numbers = itertools.count(1)
    slices: dict[str, list[Slice]] = {target.name: [] for target in targets}
    async with contextlib.AsyncExitStack() as stack:
        up: dict[str, str] = {}
        for target in targets:
            say(f"starting {target.name}")
            up[target.name] = (
                await stack.enter_async_context(running(target, fleet, directory, None))
            ).address

        async def taken(address: str, seed: int) -> tuple[list[float], int]:
            times = arrivals(plan.rate, plan.slice_s, Random(seed))
            requests = [
                request_bytes(address, fill(made[index % len(made)], next(numbers)))
                for index in range(len(times))
            ]
            result = await open_loop(address, requests, times)
            return result.times_ms, result.failed

        for name, address in up.items():
            say(f"warming up {name}")
            await taken(address, 0)
        for round_number in range(plan.rounds):
            for name in rotated(list(up), round_number):
                say(f"beside a prompt of 1 MB, round {round_number + 1} of {plan.rounds}: {name}")
                seed = 1 + round_number
                without, failed = await taken(up[name], seed)
                async with big_ones(up[name], seed) as counted:
                    with_big, more = await taken(up[name], seed)
                slices[name].append(Slice(without, with_big, counted[0], failed + more + counted[1]))
    return slices


@contextlib.asynccontextmanager
async def big_ones(address: str, seed: int) -> AsyncIterator[list[int]]:
    """Big requests to `address`, one after the other, by a process of its own.

    Yields a list that holds how many were answered, and how many failed, when the context has ended.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loadtests.live.beside", address, str(seed)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    counted = [0, 0]
    try:
        await process.stdout.readline()  # the first is through
        yield counted
        process.stdin.close()
        counted[:] = json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.stdin.close()
            await process.wait()


def rows(slices: dict[str, list[Slice]], slice_s: float) -> list[BesideRow]:
    """What was measured, by target."""
    out = []
    for name, taken in slices.items():
        pairs = [(_p(one.without_ms, 0.99), _p(one.beside_ms, 0.99)) for one in taken]
        out.append(
            BesideRow(
                name,
                statistics.median(_p(one.without_ms, 0.50) for one in taken),
                statistics.median(before for before, _ in pairs),
                statistics.median(_p(one.beside_ms, 0.50) for one in taken),
                statistics.median(after for _, after in pairs),
                statistics.median(after - before for before, after in pairs),
                statistics.median(one.big / slice_s for one in taken),
                sum(len(one.without_ms) + len(one.beside_ms) for one in taken),
                sum(one.failed for one in taken),
            )
        )
    return out


def _p(times: Sequence[float], share: float) -> float:
    return percentile(times, share) or 0.0


HEAD = ("target", "p50, ms", "p99", "p50 beside 1 MB", "p99", "added to the p99", "1 MB prompts/s", "failed")


def cells(row: BesideRow) -> list[str]:
    """One row as text, under `HEAD`."""
    return [
        row.target,
        *(f"{value:.1f}" for value in (row.p50_ms, row.p99_ms, row.beside_p50_ms, row.beside_p99_ms)),
        f"{row.added_p99_ms:+.1f}",
        f"{row.big_per_s:.1f}",
        f"{row.failed} of {row.requests}" if row.failed else "0",
    ]


async def _send_big_ones(address: str, seed: int) -> None:
    rng = Random(seed)
    pieces = [prose(rng, 400) for _ in range(_PIECES)]
    stop = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    connection = Connection(address)
    answered = failed = 0
    while not stop.done():
        content = f"{time.time_ns():x} "
        while len(content) < BIG_BYTES:
            content += rng.choice(pieces)
        messages = [{"role": "user", "content": content[:BIG_BYTES]}]
        body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()
        answer = await connection.request(request_bytes(address, body))
        answered, failed = answered + (answer.status == 200), failed + (answer.status != 200)
        if answered + failed == 1:
            print("begun", flush=True)
    connection.close()
    print(json.dumps([answered, failed]), flush=True)


if __name__ == "__main__":
    asyncio.run(_send_big_ones(sys.argv[1], int(sys.argv[2])))
