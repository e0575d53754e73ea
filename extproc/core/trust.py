"""How far a predicted hit is believed: every `cached_tokens` an engine reports is held against it.

For each worker and namespace, over the last audits (at most `WINDOW`, none older than `MEMORY_S`):

    confidence = actual cached tokens / predicted cached tokens, at most 1; 1 until there are `ENOUGH` audits

A candidate's hit is priced at the confidence of its worker in the request's namespace. Where that is not
known yet, at the lower of the worker's over all namespaces and the namespace's on the worker where it is
best: a fault of one worker is not held against others, and one that comes with a namespace is met everywhere.

Two faults cannot be left to averages, and end in a verdict to doubt what events have said of that one worker
(see `extproc.core.doubts`):

* **Silence**: a request computed at least one whole block there, and not one event came in the meantime;
  `SILENT` times in a row, and for `SILENT_S`, since after a stall the ends of requests may be heard of before
  the events that wait beside them. The stream has died without a sound.
* **Disproved**: events are known to be missing, and `DISPROVED` of the last `RECENT` audits found less than
  was predicted.

Other workers are not touched by either.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from extproc.core.divergence import Audit, Cause, Complaint, believable, diagnose
from extproc.core.namespace import Namespace
from extproc.core.types import WorkerId

WINDOW = 32
MEMORY_S = 600.0
ENOUGH = 4
SILENT = 3
SILENT_S = 0.5
RECENT = 4
DISPROVED = 2
_MAX_PAIRS = 4096


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
class _Audits:
    audits: "deque[Audit]" = field(default_factory=lambda: deque(maxlen=WINDOW))
    # Confidence, until the oldest of the audits it is of is too old; not known: until before any time.
    known: float | None = None
    until: float = -math.inf

    def add(self, audit: Audit) -> None:
        self.audits.append(audit)
        self.until = -math.inf

    def clear(self) -> None:
        self.audits.clear()
        self.until = -math.inf

    def recent(self, now: float) -> list[Audit]:
        return [audit for audit in self.audits if now - audit.at <= MEMORY_S]

    def confidence(self, now: float) -> float | None:
        """None: not enough is known."""
        if now >= self.until:
            recent = self.recent(now)
            audits = [audit for audit in recent if audit.predicted > 0]
            self.known = None if len(audits) < ENOUGH else believable(audits)
            self.until = min((audit.at for audit in recent), default=math.inf) + MEMORY_S
        return self.known


@dataclass(slots=True)
class _Elsewhere:
    """Confidence in one namespace on the workers where it is known, and as of when; the highest is kept."""

    known: dict[WorkerId, tuple[float, float]] = field(default_factory=dict)
    highest: float = 1.0
    until: float = -math.inf
    of: WorkerId | None = None

    def note(self, worker: WorkerId, confidence: float, at: float) -> None:
        self.known[worker] = (confidence, at)
        if self.of is None or worker == self.of or confidence > self.highest:
            self.until = -math.inf

    def drop(self, worker: WorkerId) -> None:
        self.known.pop(worker, None)
        if worker == self.of:
            self.until = -math.inf

    def best(self, now: float) -> float:
        """1 where it is known nowhere."""
        if now >= self.until:
            recent = [
                (value, at, worker) for worker, (value, at) in self.known.items() if now - at <= MEMORY_S
            ]
            best = max(recent, default=None, key=lambda one: one[:2])
            self.highest, at, self.of = (1.0, math.inf, None) if best is None else best
            self.until = at + MEMORY_S
        return self.highest


@dataclass(slots=True)
class _Record(_Audits):
    last_event_at: float | None = None
    silent: int = 0
    silent_since: float = 0.0
    is_silent: bool = False


class TrustBook:
    """Audits of all workers and namespaces."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Record] = {}
        self._pairs: dict[tuple[WorkerId, Namespace], _Audits] = {}
        self._namespaces: dict[Namespace, _Elsewhere] = {}

    def on_events(self, worker: WorkerId, now: float) -> None:
        """KV events of `worker` have arrived."""
        record = self._workers.setdefault(worker, _Record())
        record.last_event_at = now
        record.silent = 0
        record.is_silent = False

    def on_heard(self, worker: WorkerId, now: float) -> None:
        """KV events of `worker` have arrived that have to wait: its stream has not died."""
        record = self._workers.setdefault(worker, _Record())
        record.last_event_at = now
        record.silent = 0

    def audit(
        self,
        worker: WorkerId,
        audit: Audit,
        *,
        computed_blocks: int,
        admitted_at: float,
        complete: bool,
    ) -> Verdict:
        """Take in one finished request.

        Args:
            worker: who served it.
            audit: what was predicted, and what came of it.
            computed_blocks: whole blocks of the prompt that it had to compute.
            admitted_at: when the request was sent there.
            complete: whether every event of `worker` is known to have been seen.
        """
        record = self._workers.setdefault(worker, _Record())
        record.add(audit)
        self._note_pair(worker, audit)
        if record.last_event_at is None or record.is_silent:
            return Verdict.FINE  # it publishes nothing: nothing to lose faith in
        if computed_blocks > 0:
            if record.silent == 0:
                record.silent_since = audit.at
            record.silent = record.silent + 1 if record.last_event_at < admitted_at else 0
            if record.silent >= SILENT and audit.at - record.silent_since >= SILENT_S:
                record.is_silent = True
                return Verdict.SILENT
        if not complete:
            recent = list(record.audits)[-RECENT:]
            if sum(one.actual < one.predicted for one in recent) >= DISPROVED:
                self.forget_audits(worker)
                return Verdict.DISPROVED
        return Verdict.FINE

    def confidence(self, worker: WorkerId, namespace: Namespace, now: float) -> float:
        """Share of a predicted hit to count on, 0 to 1."""
        pair = self._pairs.get((worker, namespace))
        own = None if pair is None else pair.confidence(now)
        if own is not None:
            return own
        record = self._workers.get(worker)
        overall = None if record is None else record.confidence(now)
        elsewhere = self._namespaces.get(namespace)
        best = 1.0 if elsewhere is None else elsewhere.best(now)
        return best if overall is None else min(overall, best)

    def is_silent(self, worker: WorkerId) -> bool:
        """Whether KV events of `worker` have stopped without a word."""
        record = self._workers.get(worker)
        return record is not None and record.is_silent

    def last_event_at(self, worker: WorkerId) -> float | None:
        """When the last KV event of `worker` came."""
        record = self._workers.get(worker)
        return None if record is None else record.last_event_at

    def belief(self, worker: WorkerId, now: float) -> Belief:
        """What is thought of `worker` at `now`."""
        record = self._workers.get(worker)
        if record is None:
            return Belief(1.0, 0, None)
        age = None if record.last_event_at is None else max(0.0, now - record.last_event_at)
        confidence = record.confidence(now)
        return Belief(1.0 if confidence is None else confidence, len(record.recent(now)), age)

    def complaint(self, worker: WorkerId, now: float) -> str | None:
        """What to tell when predictions for `worker` keep failing; None when they do not."""
        found = self.diagnosis(worker, now)
        return None if found is None else found.message

    def diagnosis(self, worker: WorkerId, now: float) -> Complaint | None:
        """The likely cause when predictions for `worker` keep failing; None when they do not."""
        record = self._workers.get(worker)
        if record is None:
            return None
        if record.is_silent:
            advice = "its publisher may have died; what it holds is assumed from what is sent there meanwhile"
            return Complaint(Cause.EVENTS_MISSING, f"{Verdict.SILENT.value}: {advice}")
        return diagnose(record.recent(now), events=record.last_event_at is not None)

    def forget(self, worker: WorkerId) -> None:
        """The worker has left or restarted."""
        self._workers.pop(worker, None)
        for pair in [pair for pair in self._pairs if pair[0] == worker]:
            self._drop_pair(pair)

    def forget_audits(self, worker: WorkerId) -> None:
        """What it has been audited by no longer says anything about what is claimed now."""
        record = self._workers.get(worker)
        if record is not None:
            record.clear()
        for pair in [pair for pair in self._pairs if pair[0] == worker]:
            self._drop_pair(pair)

    def _note_pair(self, worker: WorkerId, audit: Audit) -> None:
        pair = (worker, audit.namespace)
        known = self._pairs.get(pair)
        if known is None:
            if len(self._pairs) >= _MAX_PAIRS:
                self._drop_pair(next(iter(self._pairs)))
            known = self._pairs[pair] = _Audits()
        known.add(audit)
        confidence = known.confidence(audit.at)
        if confidence is not None:
            self._namespaces.setdefault(audit.namespace, _Elsewhere()).note(worker, confidence, audit.at)

    def _drop_pair(self, pair: tuple[WorkerId, Namespace]) -> None:
        del self._pairs[pair]
        worker, namespace = pair
        known = self._namespaces.get(namespace)
        if known is not None:
            known.drop(worker)
            if not known.known:
                del self._namespaces[namespace]
