"""`coding-agent`: real coding-agent sessions, very uneven, with almost all input repeated inside a session.

Source: github.com/callanjfox/kv-cache-tester traces (Apache-2.0), re-encoded: one session a line as JSON,
`{id, block_size, requests: [{t, in, out, keep, add, agent?, api?}]}`. A prompt's content is given by ids, one
per full stretch of `block_size` (64) tokens; they are the first `keep` ids of the request before it of the
same agent in the same session, then each run `[start, count]` of `add`. Each id names the prompt up to its
end; ids are local to a session, so nothing is known to be shared between sessions. `t` is the time of the
request and `api` how long its answer took, in seconds.

Into turns. The requests of a session become its turns, in the order of `t`: those of its sub-agents too,
between the main agent's, one after the other (17 of 710 sessions have any). The pause before a turn is the
trace's, from the answer before it, at most `max_think_s`. Tokens after the last full stretch, and the output,
are those of the agent's next prompt at the same place, if it keeps the whole prompt and is long enough to
hold the output (84 % of the turns that another one follows); else they belong to this turn alone.

Parameters: `block_size` 64; `concurrency` 16 (closed loop; raise it to find the knee); `max_think_s` 60;
`max_context_tokens` 131,072: a session ends before its first request that would need more. Parts take every
n-th session; `window_s` does not apply, sessions have no common clock. Without a trace a stand-in of 24
sessions is generated from the trace's quantiles of first prompts (the lower three quarters), growth, output
and pauses, but of at most 60 requests each.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from json import JSONDecodeError, loads
from random import Random
from typing import Any

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Session, Turn, Workload, WorkloadOptions, limited
from extproc.sim.workloads.history import History, key_of, prefix_blocks
from extproc.sim.workloads.lazily import Lazily
from extproc.sim.workloads.sampling import Quantiles
from extproc.sim.workloads.trace_requests import trace_lines

_STAND_IN_SESSIONS = 24
Record = dict[str, Any]


class _Request:
    """One request of a session: its lengths, its ids and when it came (seconds)."""

    __slots__ = ("agent", "api_s", "at_s", "ids", "kept", "output", "prompt", "successor")

    def __init__(self, record: Record, before: "_Request | None") -> None:
        self.agent: str | None = record.get("agent")
        self.at_s = float(record["t"])
        self.api_s = max(0.0, float(record.get("api") or 0.0))
        self.prompt = max(1, int(record["in"]))
        self.output = max(1, int(record["out"]))
        self.kept = int(record["keep"])
        if self.kept > (len(before.ids) if before else 0):
            raise ValueError(f"keeps {self.kept} ids of a request that has fewer")
        self.ids: list[int] = before.ids[: self.kept] if before else []
        for start, count in record["add"]:
            self.ids += range(start, start + count)
        self.successor: _Request | None = None

    def goes_on_in(self, successor: "_Request") -> bool:
        """Whether the successor's prompt can be this prompt, this output and more."""
        return successor.kept >= len(self.ids) and successor.prompt >= self.prompt + self.output


def coding_agent(
    options: WorkloadOptions,
    *,
    block_size: int = 64,
    concurrency: int = 16,
    max_think_s: float = 60.0,
    max_context_tokens: int = 131_072,
) -> Workload:
    """Coding agents: real sessions of very uneven length, over 95 % of input repeated, closed loop."""

    def records() -> Iterator[Record]:
        if options.trace is None:
            return _stand_in(options.seed)
        found = read_sessions(trace_lines(options))
        return found if options.part is None else islice(found, options.part[0], None, options.part[1])

    def sessions() -> Iterator[Session]:
        for record in records():
            requests = _fitting(_requests(record), max_context_tokens)
            if requests:
                yield Session(
                    id=str(record["id"]),
                    turns=_turns(record, requests, block_size, max_think_s),
                )

    return Workload(
        name="coding-agent",
        block_size=block_size,
        sessions=Lazily(lambda: sessions() if options.limit is None else limited(sessions(), options.limit)),
        concurrency=concurrency,
        rollouts=True,
        description="replay of the trace" if options.trace else f"stand-in of {_STAND_IN_SESSIONS} sessions",
    )


def read_sessions(lines: Iterable[str]) -> Iterator[Record]:
    """The sessions of a trace.

    Raises:
        WarmrouteError: a line is not a session.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = loads(line)
            _ = record["id"], record["requests"], record["block_size"]
        except (JSONDecodeError, KeyError, TypeError) as error:
            raise WarmrouteError(f"line {number} of the trace is not a session: {error!r}") from error
        yield record


def _requests(record: Record) -> list[_Request]:
    """The requests of a session in order of time, each with its agent's next."""
    latest: dict[str | None, _Request] = {}
    requests = []
    for index, entry in enumerate(record["requests"]):
        agent = entry.get("agent")
        before = latest.get(agent)
        try:
            request = _Request(entry, before)
        except (KeyError, TypeError, ValueError) as error:
            raise WarmrouteError(
                f"request {index} of session {record['id']} of the trace is not understood: {error!r}"
            ) from error
        if before is not None:
            before.successor = request
        latest[agent] = request
        requests.append(request)
    requests.sort(key=lambda request: request.at_s)
    return requests


def _fitting(requests: list[_Request], limit: int) -> list[_Request]:
    """Those before the first that needs more than `limit` tokens."""
    for index, request in enumerate(requests):
        if request.prompt + request.output > limit:
            return requests[:index]
    return requests


def _turns(record: Record, requests: list[_Request], block_size: int, max_think_s: float) -> Iterator[Turn]:
    id_tokens = int(record["block_size"])
    space = key_of("coding-agent", record["id"])
    answered: float | None = None
    before: dict[str | None, list[int]] = {}
    for index, request in enumerate(requests):
        total = request.prompt + request.output
        successor = request.successor
        goes_on = successor is not None and request.goes_on_in(successor)
        ids = successor.ids if successor is not None and goes_on else request.ids
        # What is kept of the agent's blocks before needs no hashing again.
        known = before.get(request.agent, [])[: request.kept * id_tokens // block_size]
        covered = min(total, len(ids) * id_tokens)
        keys = _Keys(space, ids)
        blocks = known + prefix_blocks(keys, id_tokens, covered, block_size, first=len(known))
        named = min(len(blocks), len(request.ids) * id_tokens // block_size)
        own = History(block_size, key_of(space, "turn", index))
        own.extend(0, total)
        blocks += own.blocks[len(blocks) :]
        before[request.agent] = blocks[:named]
        pause = 0.0 if answered is None else min(max_think_s, max(0.0, request.at_s - answered))
        answered = max(answered or 0.0, request.at_s + request.api_s)
        yield Turn(request.prompt, request.output, blocks, think_s=pause)


class _Keys:
    """Keys of ids, as a sequence: an id means something only in its session."""

    __slots__ = ("_ids", "_space")

    def __init__(self, space: int, ids: list[int]) -> None:
        self._space = space
        self._ids = ids

    def __getitem__(self, index: int) -> int:
        # Keys need only be distinct: the block hash mixes them.
        return (self._space + self._ids[index] * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


# --- stand-in ----------------------------------------------------------------------------------------

_LENGTH = Quantiles(((0, 2), (0.05, 4), (0.25, 18), (0.5, 46), (1, 60)))
_FIRST = Quantiles(((0, 9000), (0.07, 10261), (0.33, 17696), (0.67, 21643), (1, 95000)))
_GROWTH = Quantiles(((0, 60), (0.05, 149), (0.25, 326), (0.5, 655), (0.75, 1567), (0.95, 6345), (1, 16000)))
_OUTPUT = Quantiles(((0, 20), (0.05, 89), (0.25, 137), (0.5, 216), (0.75, 426), (0.95, 1554), (1, 3687)))
_PAUSE = Quantiles(((0, 1), (0.05, 3), (0.25, 5), (0.5, 10), (0.75, 33), (0.95, 446), (1, 900)))
_ID_TOKENS = 64


def _stand_in(seed: int) -> Iterator[Record]:
    rng = Random(seed)  # noqa: S311 - a simulation
    for number in range(_STAND_IN_SESSIONS):
        requests: list[Record] = []
        at, prompt, ids, fresh = 0.0, _FIRST.tokens(rng), 0, 1
        for _ in range(_LENGTH.tokens(rng)):
            # One turn in fifteen rewrites the end of what was there.
            kept = max(0, ids - 1) if rng.random() < 1 / 15 else ids
            full = prompt // _ID_TOKENS
            output = _OUTPUT.tokens(rng)
            requests.append(
                {
                    "t": at,
                    "in": prompt,
                    "out": output,
                    "keep": kept,
                    "add": [[fresh, full - kept]],
                    "api": 8.0,
                }
            )
            fresh += full - kept
            ids = full
            prompt += output + _GROWTH.tokens(rng)
            at += 8.0 + _PAUSE.draw(rng)
        yield {"id": f"stand-in-{seed}-{number}", "block_size": _ID_TOKENS, "requests": requests}
