"""What a replay showed, added up: how many decisions were the same, and what others would have been worth."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.core.types import Candidate
from extproc.journal.replay import Step

_KEPT = 20


class Spread(NamedTuple):
    """Mean, median and 95th percentile; None without values."""

    mean: float | None
    p50: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """One decision that would have been another. Times in milliseconds, at the recorded router's prices."""

    request_id: str
    at: float
    worker: str
    reason: str
    ttft_ms: float
    total_ms: float
    instead: str
    instead_reason: str
    instead_ttft_ms: float
    instead_total_ms: float

    @property
    def difference_ms(self) -> float:
        """What the other choice would have cost more; negative: less."""
        return self.instead_total_ms - self.total_ms


@dataclass(slots=True)
class _Side:
    """What one of the two routers' choices were worth."""

    ttft_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prefill_tokens: int = 0

    def add(self, candidate: Candidate) -> None:
        self.ttft_ms.append(candidate.cost.ttft_ms)
        self.total_ms.append(candidate.cost.total_ms)
        self.cached_tokens += candidate.cached_tokens + candidate.offloaded_tokens
        self.prefill_tokens += candidate.uncovered_tokens


@dataclass(slots=True)
class Tally:
    """Adds up steps.

    Attributes:
        requests: in the journal, refused ones included.
        exact: made again to the last bit.
        drifts: numbers of the first entries that were not.
        compared: decisions that both routers made.
        changed: of these, where the other one would have chosen another worker.
        reasons: (recorded reason, other's reason) of changed ones.
        was: worth of the recorded choices that were compared.
        instead: worth of the others.
    """

    requests: int = 0
    exact: int = 0
    drifts: list[int] = field(default_factory=list)
    compared: int = 0
    changed: int = 0
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    was: _Side = field(default_factory=_Side)
    instead: _Side = field(default_factory=_Side)
    _changes: list[Change] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """One more."""
        self.requests += 1
        self.exact += step.exact
        if not step.exact and len(self.drifts) < _KEPT:
            self.drifts.append(step.number)
        if step.decision is None or step.instead is None:
            return
        chosen, other = step.decision.chosen, step.instead
        self.compared += 1
        self.was.add(chosen)
        self.instead.add(other)
        if chosen.worker == other.worker:
            return
        self.changed += 1
        reason = step.decision.reason.value
        other_reason = "" if step.instead_reason is None else step.instead_reason.value
        self.reasons[reason, other_reason] += 1
        self._changes.append(
            Change(
                request_id=step.decision.request.request_id,
                at=step.at,
                worker=str(chosen.worker),
                reason=reason,
                ttft_ms=chosen.cost.ttft_ms,
                total_ms=chosen.cost.total_ms,
                instead=str(other.worker),
                instead_reason=other_reason,
                instead_ttft_ms=other.cost.ttft_ms,
                instead_total_ms=other.cost.total_ms,
            )
        )
        if len(self._changes) > 2 * _KEPT:
            self._changes = self.largest(_KEPT)

    def largest(self, count: int = _KEPT) -> list[Change]:
        """The changes that would have made the largest difference; at most `_KEPT` are remembered."""
        ordered = sorted(self._changes, key=lambda change: -abs(change.difference_ms))
        return ordered[: min(count, _KEPT)]


def spread(values: Sequence[float]) -> Spread:
    """Of any number of values."""
    if not values:
        return Spread(None, None, None)
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Spread(sum(ordered) / len(ordered), at(0.5), at(0.95))
