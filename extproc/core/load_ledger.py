r"""Leases: what we have sent to each worker and is not known to have ended.

Theory of operation
-------------------
Every routed request holds one **lease** from the moment it is routed (`admit`, in the same step as the
decision) until it is released, exactly once, for whatever reason. The authoritative model is the set of
open leases; everything a decision reads is derived from it:

* **Prefill** is a queue per worker, first come first served, as in the engine. A lease owns the interval
  in which its uncovered tokens are expected to be computed; intervals do not overlap. Prefill load
  therefore falls by itself as time passes, and a first-token signal or an early release takes back what
  was booked and not used, moving everyone behind forward.
* **Decode** load is the number of open leases and the tokens of context they hold.

A lease is fenced by its worker's generation: when a worker leaves, its leases are dropped; if it comes
back it starts at zero and releases of the old leases find nothing.

    state \\ event   first_token       progress     release / worker gone
    ADMITTED        -> DECODING       (ignored)    -> gone
    DECODING        (ignored)         DECODING     -> gone
    gone            (unknown, None)   (unknown)    (unknown, None)

Times are monotonic seconds; durations milliseconds; sizes tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from extproc.core.types import Decision, WorkerId


@dataclass(slots=True)
class Lease:
    """One unfinished request on one worker. Mutable; owned by the ledger."""

    decision: Decision
    worker: WorkerId
    generation: int
    uncovered_tokens: int
    context_tokens: int  # prompt + generated so far, all sequences
    sequences: int
    reserved: tuple[tuple[int, ...], ...]  # block hashes counted as on their way to the worker
    admitted_at: float
    prefill_start: float
    prefill_end: float
    expires_at: float
    booked_before_ms: float  # prefill ever booked on its worker, own included
    first_token_at: float | None = None
    stream_ended_at: float | None = None
    served_by: str | None = None  # endpoint, where the gateway tells before the end

    @property
    def id(self) -> str:
        """The ticket that travels with the request."""
        return self.decision.lease_id

    def unfinished_prefill_s(self, now: float) -> float:
        """Seconds of this lease's own prefill interval that lie after `now`."""
        if self.first_token_at is not None:
            return 0.0
        return max(0.0, self.prefill_end - max(now, self.prefill_start))


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What we have put on one worker, seen at one moment."""

    active: int = 0
    sequences: int = 0
    context_tokens: int = 0
    queued_prefill_ms: float = 0.0
    queued_prefill_tokens: float = 0.0


@dataclass(slots=True)
class _Book:
    leases: dict[str, Lease] = field(default_factory=dict)  # in admission order
    sequences: int = 0
    context_tokens: int = 0
    prefill_free_at: float = 0.0


IDLE = WorkerLoad()


class LoadLedger:
    """All open leases, by worker."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._books: dict[WorkerId, _Book] = {}
        self._booked_ms: dict[WorkerId, float] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def get(self, lease_id: str) -> Lease | None:
        """The open lease of this id, if there is one."""
        return self._leases.get(lease_id)

    def leases(self, worker: WorkerId) -> tuple[Lease, ...]:
        """Open leases of one worker, in the order of their admission."""
        book = self._books.get(worker)
        return tuple(book.leases.values()) if book else ()

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def sequences(self, worker: WorkerId) -> int:
        """Sequences of all open leases of one worker."""
        book = self._books.get(worker)
        return book.sequences if book else 0

    def load(self, worker: WorkerId, now: float) -> WorkerLoad:
        """What is on `worker` at `now`. Does not change anything."""
        book = self._books.get(worker)
        if book is None or not book.leases:
            return IDLE
        queued_s = max(0.0, book.prefill_free_at - now)
        queued_tokens = 0.0
        if queued_s > 0.0:
            # Intervals follow each other in the order of admission, so the ones still open come last.
            for lease in reversed(book.leases.values()):
                if lease.prefill_end <= now:
                    break
                left = lease.unfinished_prefill_s(now)
                if left > 0.0:
                    queued_tokens += lease.uncovered_tokens * left / (lease.prefill_end - lease.prefill_start)
        return WorkerLoad(
            active=len(book.leases),
            sequences=book.sequences,
            context_tokens=book.context_tokens,
            queued_prefill_ms=queued_s * 1000.0,
            queued_prefill_tokens=queued_tokens,
        )

    def admit(
        self,
        decision: Decision,
        generation: int,
        reserved: tuple[tuple[int, ...], ...],
        now: float,
        expires_at: float,
    ) -> Lease:
        """Book the chosen candidate's work on its worker.

        Raises:
            ValueError: a lease of this id is open already.
        """
        if decision.lease_id in self._leases:
            raise ValueError(f"lease {decision.lease_id} is open already")
        chosen = decision.chosen
        book = self._books.setdefault(chosen.worker, _Book())
        start = max(now, book.prefill_free_at) if book.leases else now
        booked = self._booked_ms.get(chosen.worker, 0.0) + chosen.cost.prefill_ms
        self._booked_ms[chosen.worker] = booked
        lease = Lease(
            decision=decision,
            worker=chosen.worker,
            generation=generation,
            uncovered_tokens=chosen.uncovered_tokens,
            context_tokens=decision.request.prompt_tokens,
            sequences=decision.request.sequences,
            reserved=reserved,
            admitted_at=now,
            prefill_start=start,
            prefill_end=start + chosen.cost.prefill_ms / 1000.0,
            expires_at=expires_at,
            booked_before_ms=booked,
        )
        self._leases[lease.id] = lease
        book.leases[lease.id] = lease
        book.sequences += lease.sequences
        book.context_tokens += lease.context_tokens
        book.prefill_free_at = lease.prefill_end
        return lease

    def booked_since_ms(self, lease: Lease) -> float:
        """Prefill, in milliseconds, that was booked on the lease's worker after it."""
        return max(0.0, self._booked_ms.get(lease.worker, 0.0) - lease.booked_before_ms)

    def first_token(self, lease_id: str, now: float) -> Lease | None:
        """The engine has produced this lease's first token: its prefill is over.

        Returns the lease the first time, None when it is unknown or was decoding already.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.first_token_at is not None:
            return None
        self._take_back(lease, now)
        lease.first_token_at = now
        return lease

    def progress(self, lease_id: str, tokens: int) -> None:
        """`tokens` more have been generated for this lease (all sequences together)."""
        lease = self._leases.get(lease_id)
        if lease is not None and tokens > 0:
            lease.context_tokens += tokens
            self._books[lease.worker].context_tokens += tokens

    def release(self, lease_id: str, now: float) -> Lease | None:
        """End a lease. Returns it the first time, None ever after."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        self._take_back(lease, now)
        book = self._books[lease.worker]
        del book.leases[lease_id]
        book.sequences -= lease.sequences
        book.context_tokens -= lease.context_tokens
        if not book.leases:
            del self._books[lease.worker]
        return lease

    def drop_worker(self, worker: WorkerId) -> tuple[Lease, ...]:
        """End every lease of a worker that is gone; returns them."""
        book = self._books.pop(worker, None)
        self._booked_ms.pop(worker, None)
        if book is None:
            return ()
        for lease_id in book.leases:
            del self._leases[lease_id]
        return tuple(book.leases.values())

    def _take_back(self, lease: Lease, now: float) -> None:
        """Give the unused part of a lease's prefill interval to those behind it."""
        unused = lease.unfinished_prefill_s(now)
        if unused <= 0.0:
            return
        book = self._books[lease.worker]
        behind = False
        for other in book.leases.values():
            if behind:
                other.prefill_start -= unused
                other.prefill_end -= unused
            elif other is lease:
                behind = True
        lease.prefill_end -= unused
        book.prefill_free_at -= unused
