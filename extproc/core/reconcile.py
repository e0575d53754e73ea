"""Leases against the engine's own counts: the safety net for access log entries that never came.

An engine that reports fewer requests (running and waiting) than we have leases there, scrape after
scrape, no longer has the difference. A lease younger than `settle_s` may simply not have arrived yet, and
one scrape may have been taken between two steps; so only `rounds` scrapes in a row, all of them short,
release anything, and then only the smallest shortage seen in that time.

vLLM counts at the end of a step what that step has seen. While one takes long, or the engine hangs, whoever
came since is in no count. So a lease is judged when the engine has ended two steps after it (the second has
begun after it, too), which changing figures tell (see `extproc.core.engine_steps`); or, as an idle engine has
no steps, after `silent_s`, unless its figures stand still with requests running.
"""

from dataclasses import dataclass, field

from extproc.core.engine_steps import EngineSteps
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
        silent_s: age at which a lease counts although no step has ended after it.
    """

    ledger: LoadLedger
    settle_s: float = 3.0
    rounds: int = 3
    silent_s: float = 20.0
    _short: dict[WorkerId, _Shortage] = field(default_factory=dict)

    def check(
        self, worker: WorkerId, metrics: EngineMetrics, steps: EngineSteps, now: float
    ) -> tuple[str, ...]:
        """Ids of leases on `worker` to release as lost, after one more scrape of it that `steps` know of."""
        if metrics.running is None or metrics.waiting is None:
            return ()
        if metrics.awake is False:  # what waits there until it is woken up is in no count
            self.forget(worker)
            return ()
        judged_before = min(now - self.settle_s, self._seen_until(metrics, steps, now))
        leases = self.ledger.leases(worker)
        settled = [x for x in leases if x.sequences and x.admitted_at <= judged_before]
        # The sequences of one request end one by one: no more than one of each can be missed.
        shortage = len(settled) - metrics.running - metrics.waiting
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
        return tuple(lease.id for lease in settled[: seen.smallest])

    def _seen_until(self, metrics: EngineMetrics, steps: EngineSteps, now: float) -> float:
        """What was admitted until then is in the engine's counts, if the engine has it."""
        if metrics.generation_tokens is None:
            return now  # it does not tell its steps
        until = steps.last_but_one.at
        if metrics.running:  # it has steps, and would tell: it hangs
            return until
        return max(until, now - self.silent_s)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, or its counts mean nothing now."""
        self._short.pop(worker, None)
