"""Requests with arrival times, as most traces have them, turned into a workload of one-turn sessions."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Session, Turn, WorkloadOptions
from extproc.sim.workloads.lazily import Lazily


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        at_s: its arrival, in seconds from the beginning of the trace.
        prompt_tokens: at least 1.
        output_tokens: at least 1.
        ids: names of the prompt's leading stretches, each naming everything up to its end; empty where the
            trace says nothing about content.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...] = ()


def trace_lines(options: WorkloadOptions) -> Iterable[str]:
    """The lines of the trace the options name, read afresh each time they are iterated.

    Raises:
        WarmrouteError: nothing was given to read it with.
    """
    path, read = options.trace, options.read_lines
    if path is None or read is None:
        raise WarmrouteError("a trace needs both a path and something that reads it (read_lines)")
    return Lazily(lambda: iter(read(path)))


def selected(
    requests: Callable[[], Iterator[TraceRequest]], options: WorkloadOptions
) -> Iterator[TraceRequest]:
    """The window, part and number of requests that the options ask for, beginning at time 0.

    Parts are consecutive stretches of equally many requests: what a request finds in a cache, it finds
    because of the requests shortly before it.
    """
    begin, end = options.window_s or (0.0, float("inf"))

    def windowed() -> Iterator[TraceRequest]:
        return (request for request in requests() if begin <= request.at_s < end)

    chosen = windowed()
    if options.part is not None:
        index, count = options.part
        total = sum(1 for _ in windowed())
        chosen = islice(chosen, total * index // count, total * (index + 1) // count)
    chosen = islice(chosen, options.limit)
    start: float | None = None
    for request in chosen:
        if start is None:
            start = request.at_s
        yield TraceRequest(request.at_s - start, request.prompt_tokens, request.output_tokens, request.ids)


def mean_rate(requests: Iterable[TraceRequest]) -> float | None:
    """Requests per second from the first to the last of them; None: there are too few to tell."""
    count, last = 0, 0.0
    for request in requests:
        count, last = count + 1, request.at_s
    return (count - 1) / last if last > 0 else None


def one_turn_sessions(
    requests: Iterable[TraceRequest], turn: Callable[[TraceRequest, int], Turn], prefix: str
) -> Iterator[Session]:
    """A session for each request; `turn` makes its turn from it and its index."""
    for index, request in enumerate(requests):
        yield Session(id=f"{prefix}{index}", turns=(turn(request, index),), arrival_s=request.at_s)
