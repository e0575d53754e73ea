"""The last decisions, kept in memory as the very lines of the decision log, for whoever asks about one.

For lists a line has a short form, made when it is first shown: in a large fleet a line holds many candidates.
Bounded in number and in bytes, oldest out.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import msgspec

MAX_LINES = 1000
MAX_BYTES = 16 << 20
CANDIDATES = 4
"""How many a short form shows."""

_LARGE = frozenset(
    {"facts", "settings", "inputs", "tie_seed", "prompts", "details", "normalization", "candidate_workers"}
)
_ENCODER = msgspec.json.Encoder()


@dataclass(slots=True)
class _Kept:
    request_id: str
    prefix_key: str | None
    worker: str
    prompt_tokens: int
    cached_tokens: int
    ending: "Ending | None"  # None: nothing was decided
    line: bytes
    short: bytes | None = None  # made when it is first shown; some kilobytes at most


class Ending(NamedTuple):
    """How a request was decided and how it ended, as its line says."""

    decision: str
    load_only: str | None
    outcome: str


@dataclass(slots=True)
class HotPrefix:
    """A prefix that was asked for more than once among the kept decisions. It is named by its hash only.

    Attributes:
        prefix_key: as in the decision log.
        requests: how many asked for it.
        cached_tokens: of these requests: as reported, else as predicted.
        prompt_tokens: of these requests.
        workers: where they went, most requests first.
    """

    prefix_key: str
    requests: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    workers: dict[str, int] = field(default_factory=dict)


class RecentDecisions:
    """The last lines, newest first.

    Args:
        max_lines: how many to keep.
        max_bytes: of all lines together.
    """

    def __init__(self, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self._kept: deque[_Kept] = deque()
        self._by_id: dict[str, _Kept] = {}
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, request_id: str, entry: Mapping[str, Any], line: bytes) -> None:
        """Keep `line`, which says what `entry` says.

        `request_id` is the real one, also where the line hides it.
        """
        cached = entry.get("actual_cached_tokens")
        if cached is None:
            cached = entry.get("predicted_cached_tokens") or 0
        kept = _Kept(
            request_id,
            entry.get("prefix_key"),
            str(entry.get("selected_worker")),
            entry.get("prompt_tokens") or 0,
            cached,
            Ending(str(entry.get("decision")), entry.get("load_only"), str(entry.get("outcome"))),
            line,
        )
        self._keep(kept)

    def add_unserved(self, request_id: str, line: bytes) -> None:
        """Keep the line of a request that was never decided about: it can be found, and is in no list."""
        self._keep(_Kept(request_id, None, "", 0, 0, None, line))

    def _keep(self, kept: "_Kept") -> None:
        self._kept.append(kept)
        self._by_id[kept.request_id] = kept
        self._bytes += len(kept.line)
        while len(self._kept) > self._max_lines or self._bytes > self._max_bytes:
            gone = self._kept.popleft()
            self._bytes -= len(gone.line)
            if self._by_id.get(gone.request_id) is gone:
                del self._by_id[gone.request_id]

    def find(self, request_id: str) -> dict[str, Any] | None:
        """The last line about a request; None when there is none (any more)."""
        kept = self._by_id.get(request_id)
        return None if kept is None else msgspec.json.decode(kept.line)

    def latest(self, count: int) -> Iterator[dict[str, Any]]:
        """The last `count` lines in their short form, newest first."""
        decided = (kept for kept in reversed(self._kept) if kept.ending is not None)
        for kept in list(islice(decided, count)):  # a short form that is made may push out the oldest
            yield _short(kept)

    def endings(self, count: int) -> list[Ending]:
        """Of the last `count` requests, newest first."""
        endings = (kept.ending for kept in reversed(self._kept) if kept.ending is not None)
        return list(islice(endings, count))

    def hottest(self, count: int) -> list[HotPrefix]:
        """The prefixes most tokens were found cached of, among those that were asked for more than once."""
        found: dict[str, HotPrefix] = {}
        for kept in self._kept:
            if kept.prefix_key is None:
                continue
            prefix = found.setdefault(kept.prefix_key, HotPrefix(kept.prefix_key))
            prefix.requests += 1
            prefix.cached_tokens += kept.cached_tokens
            prefix.prompt_tokens += kept.prompt_tokens
            prefix.workers[kept.worker] = prefix.workers.get(kept.worker, 0) + 1
        hot = [prefix for prefix in found.values() if prefix.requests > 1]
        hot.sort(key=lambda prefix: (-prefix.cached_tokens, -prefix.requests, prefix.prefix_key))
        for prefix in hot[:count]:
            prefix.workers = dict(sorted(prefix.workers.items(), key=lambda pair: -pair[1]))
        return hot[:count]


def _short(kept: _Kept) -> dict[str, Any]:
    if kept.short is None:
        kept.short = _ENCODER.encode(shortened(msgspec.json.decode(kept.line)))
    found: dict[str, Any] = msgspec.json.decode(kept.short)
    return found


def shortened(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A line without what only its own explanation needs; `candidates` is how many there were."""
    short = {name: value for name, value in entry.items() if name not in _LARGE}
    found = entry.get("candidate_workers") or ()
    short["candidates"] = len(found)
    short["candidate_workers"] = [
        {name: value for name, value in candidate.items() if name != "facts"}
        for candidate in found[:CANDIDATES]
    ]
    return short
