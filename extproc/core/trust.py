"""How far a predicted hit is believed: every `cached_tokens` an engine reports is held against it.

Per worker and per namespace, over the last audits (at most `WINDOW`, none older than `MEMORY_S`):

    confidence = actual cached tokens / predicted cached tokens, at most 1; 1 until there are `ENOUGH` audits

A candidate's hit is priced at the lower of its worker's and its namespace's confidence. Two faults cannot be
left to averages, and end in a verdict to forget what events have said of that one worker and learn anew:

* **Silence**: a request computed at least one whole block there, and not one event came in the meantime;
  `SILENT` times in a row. The stream has died without a sound.
* **Disproved**: events are known to be missing, and `DISPROVED` of the last `RECENT` audits found less than
  was predicted.

Other workers are not touched by either.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from extproc.core.namespace import Namespace
from extproc.core.types import WorkerId

WINDOW = 32
MEMORY_S = 600.0
ENOUGH = 4
SILENT = 3
RECENT = 4
DISPROVED = 2
_MAX_NAMESPACES = 4096
_LOW = 0.5
_MANY = 8


class Audit(NamedTuple):
    """One finished request: tokens predicted and really found in the cache."""

    at: float
    predicted: int
    actual: int


class Verdict(Enum):
    """What an audit calls for."""

    FINE = "fine"
    SILENT = "KV events have stopped: requests compute blocks, and no event tells of them"
    DISPROVED = "KV events were lost, and what was known before is proven wrong"


class Belief(NamedTuple):
    """What is thought of one worker.

    Attributes:
        confidence: share of its predicted hits that happened lately, 0 to 1; 1 until there are `ENOUGH`.
        audits: how many predictions were compared lately.
        event_age_s: seconds since its last KV event; None: there was none.
    """

    confidence: float
    audits: int
    event_age_s: float | None


@dataclass(slots=True)
class _Record:
    audits: "deque[Audit]" = field(default_factory=lambda: deque(maxlen=WINDOW))
    last_event_at: float | None = None
    silent: int = 0

    def recent(self, now: float) -> list[Audit]:
        return [audit for audit in self.audits if now - audit.at <= MEMORY_S]

    def confidence(self, now: float) -> float:
        audits = [audit for audit in self.recent(now) if audit.predicted > 0]
        if len(audits) < ENOUGH:
            return 1.0
        predicted = sum(audit.predicted for audit in audits)
        return min(1.0, sum(min(audit.actual, audit.predicted) for audit in audits) / predicted)


class TrustBook:
    """Audits of all workers and namespaces."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Record] = {}
        self._namespaces: dict[Namespace, _Record] = {}

    def on_events(self, worker: WorkerId, now: float) -> None:
        """KV events of `worker` have arrived."""
        record = self._workers.setdefault(worker, _Record())
        record.last_event_at = now
        record.silent = 0

    def audit(
        self,
        worker: WorkerId,
        namespace: Namespace,
        *,
        predicted: int,
        actual: int,
        computed_blocks: int,
        admitted_at: float,
        complete: bool,
        now: float,
    ) -> Verdict:
        """Take in one finished request.

        Args:
            worker: who served it.
            namespace: of the request.
            predicted: cached tokens predicted for `worker`.
            actual: cached tokens it reported.
            computed_blocks: whole blocks of the prompt that it therefore had to compute.
            admitted_at: when the request was sent there.
            complete: whether every event of `worker` is known to have been seen.
            now: the time.
        """
        record = self._workers.setdefault(worker, _Record())
        audit = Audit(now, predicted, actual)
        record.audits.append(audit)
        if namespace not in self._namespaces and len(self._namespaces) >= _MAX_NAMESPACES:
            del self._namespaces[next(iter(self._namespaces))]
        self._namespaces.setdefault(namespace, _Record()).audits.append(audit)
        if record.last_event_at is None:
            return Verdict.FINE  # it never published: nothing to lose faith in
        if computed_blocks > 0:
            record.silent = record.silent + 1 if record.last_event_at < admitted_at else 0
            if record.silent >= SILENT:
                self._start_over(worker)
                return Verdict.SILENT
        if not complete:
            wrong = sum(audit.actual < audit.predicted for audit in list(record.audits)[-RECENT:])
            if wrong >= DISPROVED:
                self._start_over(worker)
                return Verdict.DISPROVED
        return Verdict.FINE

    def confidence(self, worker: WorkerId, namespace: Namespace, now: float) -> float:
        """Share of a predicted hit to count on, 0 to 1."""
        records = (self._workers.get(worker), self._namespaces.get(namespace))
        return min((record.confidence(now) for record in records if record is not None), default=1.0)

    def belief(self, worker: WorkerId, now: float) -> Belief:
        """What is thought of `worker` at `now`."""
        record = self._workers.get(worker)
        if record is None:
            return Belief(1.0, 0, None)
        age = None if record.last_event_at is None else max(0.0, now - record.last_event_at)
        return Belief(record.confidence(now), len(record.recent(now)), age)

    def complaint(self, worker: WorkerId, now: float) -> str | None:
        """The likely cause when predictions for `worker` keep failing; None when they do not."""
        record = self._workers.get(worker)
        audits = [] if record is None else record.recent(now)
        missed = sum(audit.actual > audit.predicted for audit in audits)
        if len(audits) >= _MANY and missed * 2 > len(audits):
            return (
                "the engine finds prefixes that were not predicted: its KV events are missing, or describe "
                "other token ids, adapters or salts than the requests; run `warmroute check`"
            )
        claimed = [audit for audit in audits if audit.predicted > 0]
        if record is not None and len(claimed) >= _MANY and record.confidence(now) < _LOW:
            return (
                "predicted hits do not happen: the tokenizer, template or block size may differ from the "
                "engine's, or its cache is too small for its load; run `warmroute check`"
            )
        return None

    def forget(self, worker: WorkerId) -> None:
        """The worker has left or restarted."""
        self._workers.pop(worker, None)

    def _start_over(self, worker: WorkerId) -> None:
        self._workers[worker] = _Record()
