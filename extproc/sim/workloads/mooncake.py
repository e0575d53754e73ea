"""`mooncake-conversation` and `mooncake-synthetic`: the traces of the Mooncake paper (FAST'25).

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces (Apache-2.0). One JSON object a line:
`timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one id per 512 tokens of the prompt, the last
one for what is left. Equal ids mean equal prompts up to the end of their stretch.

Into blocks. A block of the engine that ends at token e, within the stretch of id h, is known by (h, e), which
is exact for any block size. The last, shorter stretch belongs to its request alone, and so does the output:
the trace does not say when a later prompt quotes it, so hits beyond 512-token boundaries, and on answers, are
not counted. Requests come at the trace's times, each a session of its own: the trace does not say which
belong to one conversation, so session affinity finds no sessions here.

Parameters: `block_size` 64. Without a trace a stand-in of 600 requests is generated, with the trace's
quantiles of lengths, its rate and about its share of repeated blocks: conversations whose prompts share one
first stretch and grow by turns (conversation); short chats and repeatedly questioned documents (synthetic).
"""

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import count, takewhile
from json import JSONDecodeError, loads
from random import Random

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Turn, Workload, WorkloadOptions
from extproc.sim.workloads.history import History, key_of, prefix_blocks
from extproc.sim.workloads.lazily import Lazily
from extproc.sim.workloads.sampling import Quantiles
from extproc.sim.workloads.trace_requests import (
    TraceRequest,
    mean_rate,
    one_turn_sessions,
    selected,
    trace_lines,
)

ID_TOKENS = 512
_STAND_IN_REQUESTS = 600


def mooncake_conversation(options: WorkloadOptions, *, block_size: int = 64) -> Workload:
    """Mooncake's conversation trace: an hour of online chats, 12k-token prompts, open loop."""
    return _mooncake("mooncake-conversation", options, block_size)


def mooncake_synthetic(options: WorkloadOptions, *, block_size: int = 64) -> Workload:
    """Mooncake's synthetic trace: public data sets, long documents questioned again, Poisson arrivals."""
    return _mooncake("mooncake-synthetic", options, block_size)


def read_requests(lines: Iterable[str]) -> Iterator[TraceRequest]:
    """The requests of a Mooncake trace.

    Raises:
        WarmrouteError: a line is not of the form described above.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = loads(line)
            prompt = int(record["input_length"])
            request = TraceRequest(
                at_s=record["timestamp"] / 1000,
                prompt_tokens=max(1, prompt),
                output_tokens=max(1, int(record["output_length"])),
                ids=tuple(map(int, record["hash_ids"])),
            )
        except (JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise WarmrouteError(
                f"line {number} of the trace is not a Mooncake request: {error!r}"
            ) from error
        if len(request.ids) != -(-prompt // ID_TOKENS):
            raise WarmrouteError(
                f"line {number} of the trace has {len(request.ids)} hash_ids for {prompt} tokens; "
                f"there must be one per {ID_TOKENS}"
            )
        yield request


def _mooncake(name: str, options: WorkloadOptions, block_size: int) -> Workload:
    def requests() -> Iterator[TraceRequest]:
        if options.trace is None:
            make = _conversation if name == "mooncake-conversation" else _synthetic
            return make(Random(options.seed))  # noqa: S311 - a simulation
        return read_requests(trace_lines(options))

    space = key_of(name)

    def turn(request: TraceRequest, index: int) -> Turn:
        whole = request.prompt_tokens // ID_TOKENS
        keys = [key_of(space, id_) for id_ in request.ids[:whole]]
        own = History(block_size, key_of(space, "request", index))
        total = request.prompt_tokens + request.output_tokens
        own.extend(0, total)
        blocks = prefix_blocks(keys, ID_TOKENS, whole * ID_TOKENS, block_size)
        return Turn(request.prompt_tokens, request.output_tokens, blocks + own.blocks[len(blocks) :])

    return Workload(
        name=name,
        block_size=block_size,
        sessions=Lazily(lambda: one_turn_sessions(selected(requests, options), turn, "request")),
        rate=mean_rate(selected(requests, options)),
        rollouts=False,
        description="replay of the trace" if options.trace else f"stand-in of {_STAND_IN_REQUESTS} requests",
    )


# --- stand-ins ---------------------------------------------------------------------------------------

_CONVERSATION_FIRST = Quantiles(
    ((0, 900), (0.05, 1100), (0.25, 2000), (0.5, 5000), (0.75, 13000), (0.95, 36000), (1, 90000))
)
_CONVERSATION_MORE = Quantiles(((0, 20), (0.5, 300), (0.9, 2500), (1, 12000)))
_CONVERSATION_OUTPUT = Quantiles(
    ((0, 1), (0.05, 10), (0.25, 156), (0.5, 350), (0.75, 472), (0.95, 698), (1, 1500))
)
_CHAT_PROMPT = Quantiles(((0, 20), (0.1, 25), (0.5, 250), (0.9, 3000), (1, 8000)))
_DOCUMENT = Quantiles(((0, 5000), (0.25, 14000), (0.5, 21000), (0.75, 32000), (0.95, 60000), (1, 80000)))
_SYNTHETIC_OUTPUT = Quantiles(((0, 1), (0.05, 2), (0.25, 11), (0.5, 69), (0.75, 250), (0.95, 519), (1, 900)))


def _stretches(history: list[int], tokens: int, fresh: "count[int]") -> tuple[int, ...]:
    """Ids of a prompt of `tokens` tokens that begins with the whole stretches in `history`; extends it."""
    while len(history) < tokens // ID_TOKENS:
        history.append(next(fresh))
    kept = tuple(history[: tokens // ID_TOKENS])
    return kept + ((next(fresh),) if tokens % ID_TOKENS else ())


def _chat(rng: Random, at: float, fresh: "count[int]", shared: int) -> Iterator[TraceRequest]:
    history = [shared]
    prompt = _CONVERSATION_FIRST.tokens(rng)
    while True:
        output = _CONVERSATION_OUTPUT.tokens(rng)
        yield TraceRequest(at, prompt, output, _stretches(history, prompt, fresh))
        if rng.random() < 0.52:
            return
        prompt += output + _CONVERSATION_MORE.tokens(rng)
        at += 10 + rng.expovariate(1 / 60)


def _conversation(rng: Random) -> Iterator[TraceRequest]:
    """3.4 requests a second in chats of 1.9 turns on average, which began up to some minutes before."""
    fresh = count(1)
    starts, at = [], -300.0
    while at < _STAND_IN_REQUESTS / 3.4:
        starts.append(at)
        at += rng.expovariate(1.8)
    chats = [tuple(_chat(rng, start, fresh, 0)) for start in starts]
    ordered = merge(*chats, key=lambda request: request.at_s)
    end = _STAND_IN_REQUESTS / 3.4
    yield from takewhile(lambda r: r.at_s < end, (r for r in ordered if r.at_s >= 0))


def _synthetic(rng: Random) -> Iterator[TraceRequest]:
    """3.9 requests a second; half are short chats, half are questions on one of a few open documents."""
    fresh = count(1)
    open_documents: list[list[int]] = []
    at = 0.0
    for _ in range(_STAND_IN_REQUESTS):
        at += rng.expovariate(3.9)
        output = _SYNTHETIC_OUTPUT.tokens(rng)
        if rng.random() < 0.4:
            prompt = _CHAT_PROMPT.tokens(rng)
            yield TraceRequest(at, prompt, output, _stretches([], prompt, fresh))
            continue
        if not open_documents or rng.random() < 0.3:
            stretches = _DOCUMENT.tokens(rng) // ID_TOKENS
            open_documents = [*open_documents[-15:], [next(fresh) for _ in range(stretches)]]
        document = rng.choice(open_documents)
        prompt = len(document) * ID_TOKENS + rng.randint(20, 400)
        yield TraceRequest(at, prompt, output, _stretches(document[:], prompt, fresh))
