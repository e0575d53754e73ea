"""Prefill that was sent to each worker lately, by time: what a request shared its step with.

An engine computes what waits when a step begins in one step, so a request whose prompt is short waits for
those of others that came a moment later. What prefill costs can only be learned from requests that had next
to nobody beside them, and that is known when they have ended.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from extproc.core.types import WorkerId

_KEPT = 512


@dataclass(slots=True)
class _Log:
    times: list[float] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)  # tokens up to and with this one
    total: int = 0


class Arrivals:
    """The last few hundred of each worker."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Log] = {}

    def note(self, worker: WorkerId, tokens: int, now: float) -> None:
        """`tokens` of prompt to compute were sent to `worker`."""
        log = self._workers.setdefault(worker, _Log())
        log.total += tokens
        log.times.append(now)
        log.totals.append(log.total)
        if len(log.times) >= 2 * _KEPT:
            del log.times[:_KEPT], log.totals[:_KEPT]

    def between(self, worker: WorkerId, start: float, end: float) -> int | None:
        """Tokens that were sent from `start` to `end`, both included; None: that is too long ago."""
        log = self._workers.get(worker)
        if log is None or not log.times:
            return 0
        first, last = bisect_left(log.times, start), bisect_right(log.times, end)
        if first == 0 and len(log.times) >= _KEPT:
            return None
        if first >= last:
            return 0
        before = log.totals[first - 1] if first else 0
        return log.totals[last - 1] - before

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._workers.pop(worker, None)
