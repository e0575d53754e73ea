"""Leases against the engine's own counts: the safety net for access log entries that never came.

An engine that reports fewer requests (running and waiting) than we have leases there, scrape after
scrape, no longer has the difference. A lease younger than `settle_s` may simply not have arrived yet, and
one scrape may have been taken between two steps; so only `rounds` scrapes in a row, all of them short,
release anything, and then only the smallest shortage seen in that time.
"""

from dataclasses import dataclass, field

from extproc.core.load_ledger import LoadLedger
from extproc.core.types import EngineMetrics, WorkerId


@dataclass(slots=True)
class _Shortage:
    rounds: int
    smallest: int


@dataclass(slots=True)
class Reconciler:
    """Finds leases that the engine does not know.

    Args:
        ledger: the open leases; only read.
        settle_s: age a lease must have before its absence means anything.
        rounds: scrapes in a row that must be short.
    """

    ledger: LoadLedger
    settle_s: float = 3.0
    rounds: int = 3
    _short: dict[WorkerId, _Shortage] = field(default_factory=dict)

    def check(self, worker: WorkerId, metrics: EngineMetrics, now: float) -> tuple[str, ...]:
        """Ids of leases on `worker` to release as lost, after one more scrape of it."""
        if metrics.running is None or metrics.waiting is None:
            return ()
        settled = [x for x in self.ledger.leases(worker) if now - x.admitted_at >= self.settle_s]
        shortage = sum(x.sequences for x in settled) - metrics.running - metrics.waiting
        if shortage <= 0:
            self._short.pop(worker, None)
            return ()
        seen = self._short.setdefault(worker, _Shortage(0, shortage))
        seen.rounds += 1
        seen.smallest = min(seen.smallest, shortage)
        if seen.rounds < self.rounds:
            return ()
        del self._short[worker]
        # Those whose stream has ended are the likeliest to be over, then the oldest.
        settled.sort(key=lambda x: (x.stream_ended_at is None, x.admitted_at))
        lost: list[str] = []
        missing = seen.smallest
        for lease in settled:
            if lease.sequences > missing:
                break
            missing -= lease.sequences
            lost.append(lease.id)
        return tuple(lost)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._short.pop(worker, None)
