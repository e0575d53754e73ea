"""The two measurements: what a proxy costs, and what a routing policy saves. Interleaved, in rounds."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from extproc.adapters.child_process import ChildError
from extproc.core.errors import WarmrouteError
from loadtests.live.fleet import MODEL, Fleet
from loadtests.live.load import (
    Throughput,
    closed_loop,
    find_wrk,
    open_loop,
    request_bytes,
    wrk,
    wrk_script,
)
from loadtests.live.priority import descendants, prefer
from loadtests.live.quality import Run, Shape, play
from loadtests.live.report import Slice
from loadtests.live.schedule import LOADS, Load, arrivals, fill, latency, rotated, templates
from loadtests.live.targets import Running, Target, running

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """How long and how hard. Rates are of the open loop, per size of prompt, in requests per second."""

    rounds: int
    open_s: float
    closed_s: float
    rates: dict[str, float]
    concurrency: int = 16
    templates: int = 16
    seed: int = 1


FULL_OVERHEAD = OverheadPlan(rounds=3, open_s=3.0, closed_s=2.0, rates={"2 KB": 60.0, "128 KB": 15.0})
QUICK_OVERHEAD = OverheadPlan(rounds=1, open_s=1.0, closed_s=1.0, rates={"2 KB": 40.0, "128 KB": 10.0})


def with_rounds(plan: OverheadPlan, rounds: int) -> OverheadPlan:
    """The same plan with another number of rounds."""
    return replace(plan, rounds=rounds)


@dataclass(slots=True)
class Outcome:
    """Slices or runs by (load or workload, target); commands by target; why targets are missing."""

    commands: dict[str, str]
    skipped: list[str]


async def overhead(
    fleet: Fleet,
    targets: Sequence[Target],
    plan: OverheadPlan,
    directory: Path,
    peers_venv: str | None,
    say: Say,
) -> tuple[dict[tuple[str, str], list[Slice]], Outcome]:
    """Latency and throughput of every target under every load. All targets run the whole time, and take
    turns: a slice each, in an order that shifts from round to round.
    """
    outcome = Outcome({}, [])
    slices: dict[tuple[str, str], list[Slice]] = {}
    binary = find_wrk()
    async with contextlib.AsyncExitStack() as stack:
        up: dict[str, Running] = {}
        for target in targets:
            say(f"starting {target.name}")
            try:
                one = await stack.enter_async_context(running(target, fleet, directory, peers_venv))
            except ChildError as error:
                outcome.skipped.append(str(error))
                continue
            up[target.name] = one
            outcome.commands[target.name] = one.command
        for load in LOADS:
            made = templates(load, plan.templates, MODEL, Random(plan.seed))
            script = directory / f"{re.sub(r'[^a-z0-9]+', '-', load.name.lower())}.lua"
            for name in up:
                slices[load.name, name] = []
            numbers = itertools.count(1)
            for round_number in range(plan.rounds):
                for name in rotated(list(up), round_number):
                    say(f"round {round_number + 1} of {plan.rounds}, {load.name}: {name}")
                    slices[load.name, name].append(
                        await _slice(up[name], load, made, numbers, plan, round_number, binary, script)
                    )
    return slices, outcome


async def _slice(
    target: Running,
    load: Load,
    made: Sequence[tuple[bytes, bytes]],
    numbers: Iterator[int],
    plan: OverheadPlan,
    round_number: int,
    binary: str | None,
    script: Path,
) -> Slice:
    address = target.address

    def make(number: int) -> bytes:
        return request_bytes(address, fill(made[number % len(made)], next(numbers)))

    # The same times for every target of a round.
    times = arrivals(plan.rates[load.size], plan.open_s, Random(plan.seed + round_number))
    warm_up = [make(number) for number in range(len(made))]
    await open_loop(address, warm_up, [number * 0.02 for number in range(len(warm_up))])
    measured = await open_loop(address, [make(number) for number in range(len(times))], times)
    throughput: Throughput
    if binary is not None:
        # No prompt twice: numbers that neither the open loop nor another round uses.
        text = wrk_script(made, next(numbers) * 1_000_000)
        throughput = await wrk(binary, address, text, script, plan.concurrency, plan.closed_s)
    else:
        throughput = await closed_loop(address, make, plan.concurrency, plan.closed_s)
    return Slice(latency(measured.times_ms, measured.failed), throughput)


async def quality(
    fleet: Fleet,
    targets: Sequence[Target],
    shape: Shape,
    workloads: Sequence[str],
    repetitions: int,
    directory: Path,
    peers_venv: str | None,
    say: Say,
    keep_decisions: Path | None = None,
    *,
    gateways_first: bool = False,
) -> tuple[dict[tuple[str, str], list[Run]], Outcome]:
    """Every workload through every target, as often as `repetitions` says. A target starts afresh for each
    run and meets empty engines, so that nobody profits from another's work or is misled by it. Repetition i
    has the same texts for all. With `gateways_first` no target waits for a core (see `priority`).
    """
    outcome = Outcome({}, [])
    engines = descendants(os.getpid())
    runs: dict[tuple[str, str], list[Run]] = {}
    by_name = {target.name: target for target in targets}
    for workload in workloads:
        for name in by_name:
            runs[workload, name] = []
        for repetition in range(repetitions):
            dialogues = shape.workload(workload, seed=101 + repetition)
            for name in rotated(list(by_name), repetition):
                done = 0

                def advance(name: str = name, label: str = workload, total: int = dialogues.requests) -> None:
                    nonlocal done
                    done += 1
                    say(f"{label}, repetition {repetition + 1}: {name}, {done} of {total}")  # noqa: B023

                say(f"{workload}, repetition {repetition + 1} of {repetitions}: starting {name}")
                try:
                    async with running(by_name[name], fleet, directory, peers_venv) as target:
                        await fleet.reset()
                        await target.settled()
                        if gateways_first:
                            prefer(descendants(os.getpid()) - engines | {os.getpid()})
                        run = await play(target.address, MODEL, dialogues, shape.concurrency, advance)
                        outcome.commands[name] = target.command
                        _keep(target, keep_decisions, f"{workload}-{repetition}")
                except ChildError as error:
                    outcome.skipped.append(str(error))
                    del by_name[name]
                    for key in [key for key in runs if key[1] == name]:
                        del runs[key]
                    continue
                runs[workload, name].append(run)
    if not runs:
        raise WarmrouteError("no target could be started:\n" + "\n".join(outcome.skipped))
    return runs, outcome


def _keep(target: Running, folder: Path | None, name: str) -> None:
    if folder is not None and target.decisions is not None and target.decisions.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"decisions-{name}.jsonl").write_bytes(target.decisions.read_bytes())
