"""`azure-control`: real arrivals and lengths with nothing to share, so that no policy can win by its cache.

Source: Azure LLM inference trace 2023 (github.com/Azure/AzurePublicDataset, CC-BY-4.0), described in
Patel et al., Splitwise, ISCA 2024. CSV with a header: `TIMESTAMP,ContextTokens,GeneratedTokens`. The trace
holds no content; every prompt here is unlike every other. Requests come at the trace's times, each a session
of its own.

Parameters: `block_size` 16. Without a trace a stand-in of 1,000 requests is generated with the conversation
trace's quantiles of lengths and its rate (5.5 a second), as a Poisson process.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from random import Random

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Turn, Workload, WorkloadOptions
from extproc.sim.workloads.history import History, key_of
from extproc.sim.workloads.lazily import Lazily
from extproc.sim.workloads.sampling import Quantiles
from extproc.sim.workloads.trace_requests import (
    TraceRequest,
    mean_rate,
    one_turn_sessions,
    selected,
    trace_lines,
)

_STAND_IN_REQUESTS = 1000
_RATE = 5.5
_PROMPT = Quantiles(((0, 10), (0.05, 181), (0.25, 396), (0.5, 1020), (0.75, 1189), (0.95, 4083), (1, 4200)))
_OUTPUT = Quantiles(((0, 1), (0.05, 41), (0.25, 85), (0.5, 129), (0.75, 395), (0.95, 451), (1, 700)))
_HEADER = "TIMESTAMP"
_MICROSECONDS = 26  # characters of a time stamp that `datetime` understands; the trace has one digit more


def azure_control(options: WorkloadOptions, *, block_size: int = 16) -> Workload:
    """The control: Azure's 2023 arrivals and lengths, nothing shared; every policy should do the same."""

    def requests() -> Iterator[TraceRequest]:
        if options.trace is None:
            return _stand_in(Random(options.seed))  # noqa: S311 - a simulation
        return read_requests(trace_lines(options))

    def turn(request: TraceRequest, index: int) -> Turn:
        own = History(block_size, key_of("azure", options.seed, index))
        own.extend(0, request.prompt_tokens + request.output_tokens)
        return Turn(request.prompt_tokens, request.output_tokens, own.blocks)

    return Workload(
        name="azure-control",
        block_size=block_size,
        sessions=Lazily(lambda: one_turn_sessions(selected(requests, options), turn, "request")),
        rate=mean_rate(selected(requests, options)),
        rollouts=False,
        description="replay of the trace" if options.trace else f"stand-in of {_STAND_IN_REQUESTS} requests",
    )


def read_requests(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """The requests of an Azure trace.

    Raises:
        WarmrouteError: a line is not of the form described above.
    """
    begin: datetime | None = None
    for number, line in enumerate(lines, 1):
        text = line.strip().lstrip("\ufeff")
        if not text or text.startswith(_HEADER):
            continue
        try:
            stamp, prompt, output = text.split(",")
            at = datetime.fromisoformat(stamp[:_MICROSECONDS])
            begin = begin or at
            yield TraceRequest((at - begin).total_seconds(), max(1, int(prompt)), max(1, int(output)))
        except ValueError as error:
            raise WarmrouteError(
                f"line {number} of the trace is not TIMESTAMP,ContextTokens,GeneratedTokens: {error}"
            ) from error


def _stand_in(rng: Random) -> Iterator[TraceRequest]:
    at = 0.0
    for _ in range(_STAND_IN_REQUESTS):
        yield TraceRequest(at, _PROMPT.tokens(rng), _OUTPUT.tokens(rng))
        at += rng.expovariate(_RATE)
