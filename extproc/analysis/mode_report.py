"""Decision logs, compared by rollout mode: what each gave to warm, partly warm and cold requests.

A request is *warm* if the engine found all of its prompt but less than a block, *partial* if it found some,
*cold* if none; *unknown* if nobody told. Only finished requests count, and those that were not routed by load
alone for want of their tokens are told apart by the share of cached tokens. Of each group:

- time to first token, milliseconds, as Envoy measured it: median, and what nine and 99 of 100 stay within;
- queue, milliseconds: the wait that was predicted for the worker that was chosen;
- evicted: KV blocks that left its worker's GPU while a request ran, on average;
- cached: share of prompt tokens the engine had; *ours*: what it would have been where our policy sends them.

In modes observe and shadow *ours* is what enforcing would change. Modes can only be compared if their traffic
is alike: let a percentage choose it, not a kind of request.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WARMTHS = ("warm", "partial", "cold", "unknown")
MODES = ("observe", "shadow", "enforce")


@dataclass(slots=True)
class Group:
    """Requests of one mode and one warmth. Times are milliseconds."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ours_tokens: int = 0
    evicted_blocks: int = 0
    evictions_known: int = 0
    ttft: "array[float]" = field(default_factory=lambda: array("f"))
    queue: "array[float]" = field(default_factory=lambda: array("f"))

    def add(self, line: Mapping[str, Any]) -> None:
        """Count one request."""
        self.requests += 1
        prompt = _number(line.get("prompt_tokens")) or 0
        self.prompt_tokens += int(prompt)
        self.cached_tokens += int(min(prompt, _number(line.get("actual_cached_tokens")) or 0))
        self.ours_tokens += int(min(prompt, _ours(line)))
        for values, key in ((self.ttft, "ttft_ms"), (self.queue, "queue_wait_ms")):
            value = _number(line.get(key))
            if value is not None:
                values.append(value)
        evicted = _number(line.get("evicted_blocks"))
        if evicted is not None:
            self.evicted_blocks += int(evicted)
            self.evictions_known += 1

    def merge(self, other: "Group") -> None:
        """Take in another group."""
        for name in (
            "requests", "prompt_tokens", "cached_tokens", "ours_tokens", "evicted_blocks", "evictions_known",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ttft.extend(other.ttft)
        self.queue.extend(other.queue)

    def figures(self) -> dict[str, float | int | None]:
        """What is reported of it; None: not known."""
        tokens = self.prompt_tokens
        return {
            "requests": self.requests,
            "ttft_p50_ms": quantile(self.ttft, 0.5),
            "ttft_p90_ms": quantile(self.ttft, 0.9),
            "ttft_p99_ms": quantile(self.ttft, 0.99),
            "queue_p50_ms": quantile(self.queue, 0.5),
            "queue_p90_ms": quantile(self.queue, 0.9),
            "evicted_blocks": self.evicted_blocks / self.evictions_known if self.evictions_known else None,
            "prompt_tokens": tokens,
            "cached_share": self.cached_tokens / tokens if tokens else None,
            "ours_share": self.ours_tokens / tokens if tokens else None,
        }


@dataclass(slots=True)
class ModeReport:
    """All groups of some logs.

    Attributes:
        pool: only requests of this pool; None: all.
        tenant: only requests of this tenant; None: all.
        traffic_class: only requests of this class; None: all.
        unfinished: requests left out because they failed, were cancelled, or lost.
        foreign: lines that are none of a decision log.
    """

    pool: str | None = None
    tenant: str | None = None
    traffic_class: str | None = None
    unfinished: int = 0
    foreign: int = 0
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)

    def add(self, line: object) -> None:
        """Count one line of a log."""
        if not isinstance(line, Mapping) or "candidate_workers" not in line or "outcome" not in line:
            self.foreign += 1
            return
        wanted = (("pool", self.pool), ("tenant", self.tenant), ("traffic_class", self.traffic_class))
        if any(value is not None and line.get(key) != value for key, value in wanted):
            return
        if line["outcome"] != "finished":
            self.unfinished += 1
            return
        mode = line.get("mode")
        key = (mode if mode in MODES else "enforce", warmth(line))
        self.groups.setdefault(key, Group()).add(line)

    def modes(self) -> tuple[str, ...]:
        """Modes that occur, in the order of a rollout."""
        return tuple(mode for mode in MODES if any(key[0] == mode for key in self.groups))

    def total(self, mode: str) -> Group:
        """All requests of a mode."""
        total = Group()
        for (of, _), group in self.groups.items():
            if of == mode:
                total.merge(group)
        return total

    def as_json(self) -> dict[str, Any]:
        """Every figure, by mode and warmth."""
        return {
            "modes": {
                mode: {
                    **{
                        warm: self.groups[mode, warm].figures()
                        for warm in WARMTHS
                        if (mode, warm) in self.groups
                    },
                    "all": self.total(mode).figures(),
                }
                for mode in self.modes()
            },
            "unfinished": self.unfinished,
            "foreign_lines": self.foreign,
        }


def warmth(line: Mapping[str, Any]) -> str:
    """How much of its prompt the engine had."""
    cached, prompt = _number(line.get("actual_cached_tokens")), _number(line.get("prompt_tokens"))
    if cached is None or not prompt:
        return "unknown"
    if cached <= 0:
        return "cold"
    block = _number(_first(line.get("candidate_workers")).get("block_size")) or 1
    return "warm" if prompt - cached <= block * max(1, _number(line.get("prompts")) or 1) else "partial"


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed; None: there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _ours(line: Mapping[str, Any]) -> float:
    """Tokens cached at the worker our policy chose, as predicted."""
    candidates = line.get("candidate_workers")
    if line.get("mode") == "shadow":
        shadow = line.get("shadow")
        chosen = _first(list(shadow.values())).get("worker") if isinstance(shadow, Mapping) else None
        for candidate in candidates if isinstance(candidates, list) else ():
            if isinstance(candidate, Mapping) and candidate.get("worker") == chosen:
                return _number(candidate.get("cached_tokens")) or 0
        return 0
    return _number(_first(candidates).get("cached_tokens")) or 0


def _first(values: object) -> Mapping[str, Any]:
    found = values[0] if isinstance(values, list) and values else None
    return found if isinstance(found, Mapping) else {}


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
