"""What clients ask for: sessions of turns, as hashed blocks, and when they come.

A workload holds no text and no tokens, only where prefixes agree. The blocks of a turn are chained content
hashes, one per full block of its prompt and output together: the hash of a block depends on everything
before it, so two turns share a prefix of k blocks exactly if their first k hashes are equal. Hashes are
integers of at most 64 bits. A turn that continues its session begins with the blocks of the turn before.

Sessions may be lazy (a generator): a workload of a million requests is never in memory as a whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        prompt_tokens: its whole prompt, history included; at least 1.
        output_tokens: what the model will really generate; at least 1. Only the engine knows it.
        blocks: chained hashes of the `(prompt_tokens + output_tokens) // block_size` full blocks.
        think_s: seconds between the end of the turn before and this one.
        max_output_tokens: the limit the client sends; None: it sends none.
    """

    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    think_s: float = 0.0
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation, rollout or agent run: its turns are sent one after the other.

    Attributes:
        id: unique in the workload.
        turns: iterated once, one turn ahead of what has been sent; a generator will do.
        arrival_s: when its first turn is sent; None: as soon as one of the workload's places is free.
        group: statistics class, e.g. "hot" and "cold"; reports split by it when there are several.
        tenant: whose it is. Sharing is decided by the hashes alone.
        step: of a stepped workload (see `Workload.steps_in_flight`); None: no step.
    """

    id: str
    turns: Iterable[Turn]
    arrival_s: float | None = None
    group: str = ""
    tenant: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in the order in which they start; arrivals, where given, ascend.

    Attributes:
        name: what reports call it.
        block_size: tokens per block of every hash in it; the engines use the same.
        sessions: iterated once per run.
        concurrency: closed loop: how many sessions without arrival time run at once. None: every session
            has an arrival time.
        rate: mean sessions per second of the given arrival times, if known; lets them be compressed.
        steps_in_flight: with steps: a session of step s starts only when all sessions of the steps up to
            `s - steps_in_flight` have ended. None: steps do not wait for each other. Sessions come in
            ascending order of step.
        rollouts: whether a session is a rollout whose end-to-end time is of interest.
        description: one line for tables.
    """

    name: str
    block_size: int
    sessions: Iterable[Session]
    concurrency: int | None = None
    rate: float | None = None
    steps_in_flight: int | None = None
    rollouts: bool = True
    description: str = ""


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What a workload is made from. How much load is offered is not its business: see `offered`.

    Attributes:
        seed: of everything random in it. One seed, one workload.
        trace: file or folder to replay; None: a short synthetic stand-in.
        limit: stop after about this many requests; None: its natural length.
        part: (i, n): only the i-th (from 0) of n equal parts of the trace, so that what was tuned on some
            can be tested on others; None: all of it.
        window_s: (from, to): only what the trace has in these seconds; None: all of it.
        read_lines: reads `trace` (`extproc.adapters.traces.read_lines`); needed only with a trace.
    """

    seed: int = 0
    trace: Path | None = None
    limit: int | None = None
    part: tuple[int, int] | None = None
    window_s: tuple[float, float] | None = None
    read_lines: Callable[[Path], Iterable[str]] | None = None


WorkloadMaker = Callable[[WorkloadOptions], Workload]
"""Makes a fresh workload. The first line of its docstring describes it in `warmroute simulate --list`.

`extproc.sim.workloads.WORKLOADS: dict[str, WorkloadMaker]` is the registry. A maker raises `WarmrouteError`
where the trace is not what it expects.
"""


def offered(
    workload: Workload, *, rate: float | None = None, concurrency: int | None = None, seed: int = 0
) -> Workload:
    """The same sessions under another load.

    Args:
        workload: as made.
        rate: sessions per second. Given arrival times are compressed or stretched to it where the
            workload knows its own rate; else sessions arrive as a Poisson process.
        concurrency: sessions at once, each started when another ends; arrival times are dropped.
        seed: of the Poisson process.

    Raises:
        ValueError: both are given, or one is not above 0.
    """
    if rate is not None and concurrency is not None:
        raise ValueError("a load is either a rate (open loop) or a concurrency (closed loop), not both")
    if rate is not None:
        if not rate > 0:
            raise ValueError(f"rate is {rate}; it must be above 0 sessions per second")
        if workload.rate is not None:
            sessions: Iterable[Session] = _stretched(workload.sessions, workload.rate / rate)
        else:
            sessions = _poisson(workload.sessions, rate, Random(seed))  # noqa: S311 - a simulation
        return replace(workload, sessions=sessions, concurrency=None, rate=rate, steps_in_flight=None)
    if concurrency is not None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        return replace(workload, sessions=_closed(workload.sessions), concurrency=concurrency, rate=None)
    return workload


def limited(sessions: Iterable[Session], requests: int) -> Iterator[Session]:
    """Sessions until they hold `requests` turns; the last one is cut short."""
    left = requests
    for session in sessions:
        if left <= 0:
            return
        turns = tuple(session.turns)[:left]
        left -= len(turns)
        yield replace(session, turns=turns)


def _poisson(sessions: Iterable[Session], rate: float, rng: Random) -> Iterator[Session]:
    at = 0.0
    for session in sessions:
        at += rng.expovariate(rate)
        yield replace(session, arrival_s=at)


def _stretched(sessions: Iterable[Session], factor: float) -> Iterator[Session]:
    for session in sessions:
        yield session if session.arrival_s is None else replace(session, arrival_s=session.arrival_s * factor)


def _closed(sessions: Iterable[Session]) -> Iterator[Session]:
    for session in sessions:
        yield replace(session, arrival_s=None)
