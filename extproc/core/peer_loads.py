r"""What other routers of the same fleet have sent to its workers, as far as they have told.

Theory of operation
-------------------
Every replica decides alone and tells the others what it has put on each worker, again and again. What it
tells are absolute values, so nothing adds up wrongly when a message is lost, repeated or late. A replica is a
name; each of its starts is an **epoch**, later starts have higher ones; within it messages are numbered.

    message            takes effect on
    of a lower epoch   nothing
    of a higher epoch  everything: what the replica told before it restarted is forgotten
    delta              the workers in it, each unless something newer is known of it
    snapshot           all workers: those not in it have nothing from this replica, unless newer is known

So the last writer wins, per replica and worker; the order of arrival does not matter; and a lost delta is
healed by the next snapshot.

What was told ages. Queued prefill is worked off meanwhile, as in the ledger of the replica itself. And a
replica that has been silent for `fade_after_s` counts for less and less, for nothing after `gone_after_s`:

    weight = min(1, (gone_after_s - silent_s) / (gone_after_s - fade_after_s)), at least 0

By then the engines' own counts tell of what is still running there: it is *foreign* load, load beyond
ours and what peers have told (see `WorkerState.note_foreign`), so no request counts twice at any time.

Tokens, milliseconds; times are monotonic seconds of the reader.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.core.types import WorkerId

MAX_REPLICAS = 256
NOMINAL_OUTPUT = 1024.0  # tokens, up to which remaining output is told apart


class ToldLoad(NamedTuple):
    """What one replica, or all others together, have on one worker.

    `remaining_tokens`: what their sequences are yet expected to generate, at most `NOMINAL_OUTPUT` each.
    """

    sequences: int = 0
    prefilling: int = 0  # of `sequences`, those expected to wait for their first token
    context_tokens: int = 0
    private_tokens: int = 0
    queued_prefill_ms: float = 0.0
    queued_prefill_tokens: float = 0.0
    remaining_tokens: float = 0.0

    def beside(self, length: float) -> float:
        """Decode steps that a sequence of `length` tokens shares with theirs, summed over them."""
        return min(self.sequences * length, self.remaining_tokens)

    def context_beside(self, length: float) -> float:
        """Context of theirs, summed over the steps of a sequence of `length` tokens."""
        return 0.0 if not self.sequences else self.beside(length) * self.context_tokens / self.sequences


NOTHING_TOLD = ToldLoad()


@dataclass(frozen=True, slots=True)
class SentPrefix:
    """A prompt that a replica has sent to a worker, and how long events may not tell of it.

    `hashes`: of its full blocks, from the first on.
    """

    worker: WorkerId
    hashes: tuple[int, ...]
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class PeerNews:
    """One message of one replica.

    Attributes:
        replica: its name.
        epoch: of its start.
        number: of the message; grows within the epoch.
        whole: a snapshot: workers that are not in `loads` have nothing.
        loads: by worker.
        sent: prefixes on their way to workers; only told once.
    """

    replica: str
    epoch: int
    number: int
    whole: bool
    loads: tuple[tuple[WorkerId, ToldLoad], ...] = ()
    sent: tuple[SentPrefix, ...] = ()


class HeardReplica(NamedTuple):
    """How a replica looks from here."""

    name: str
    epoch: int
    silent_s: float
    weight: float
    sequences: int


class _Told(NamedTuple):
    number: int
    load: ToldLoad
    at: float


@dataclass(slots=True)
class _Replica:
    epoch: int
    number: int = -1  # highest heard
    whole: int = -1  # number of the latest snapshot
    heard_at: float = 0.0
    told: dict[WorkerId, _Told] = field(default_factory=dict)


class PeerLoads:
    """What all other replicas have told.

    Args:
        fade_after_s: silence after which a replica's load begins to count for less.
        gone_after_s: silence after which it counts for nothing.
    """

    def __init__(self, fade_after_s: float = 2.0, gone_after_s: float = 6.0) -> None:
        if not 0.0 < fade_after_s < gone_after_s:
            raise ValueError(f"fading from {fade_after_s} s to {gone_after_s} s: the first must be less")
        self._fade_after_s = fade_after_s
        self._gone_after_s = gone_after_s
        self._replicas: dict[str, _Replica] = {}
        self.refused = 0  # messages of replicas beyond `MAX_REPLICAS`

    def __len__(self) -> int:
        return len(self._replicas)

    def take(self, news: PeerNews, is_member: Callable[[WorkerId], bool], now: float) -> bool:
        """One message. False when it is older than what is known, or of one replica too many.

        Args:
            news: the message.
            is_member: whether a worker is one of ours; others are left out.
            now: when it arrived.
        """
        replica = self._replicas.get(news.replica)
        if replica is None or news.epoch > replica.epoch:
            if replica is None and len(self._replicas) >= MAX_REPLICAS:
                self.refused += 1
                return False
            replica = self._replicas[news.replica] = _Replica(news.epoch, heard_at=now)
        elif news.epoch < replica.epoch:
            return False
        fresh = news.number > replica.number
        if fresh:
            replica.number, replica.heard_at = news.number, now
        if news.whole and news.number > replica.whole:
            replica.whole = news.number
            replica.told = {w: told for w, told in replica.told.items() if told.number > news.number}
        elif news.number <= replica.whole:
            return fresh
        for worker, load in news.loads:
            known = replica.told.get(worker)
            if (known is None or known.number < news.number) and is_member(worker):
                nothing = load == NOTHING_TOLD  # what came over the wire is equal to it, not the same
                replica.told[worker] = _Told(news.number, NOTHING_TOLD if nothing else load, now)
        return fresh

    def load(self, worker: WorkerId, now: float) -> ToldLoad:
        """What the others have on `worker` by now; `NOTHING_TOLD` itself when that is nothing."""
        found = NOTHING_TOLD
        for replica in self._replicas.values():
            told = replica.told.get(worker)
            if told is not None and told.load is not NOTHING_TOLD:
                weight = self._weight(replica, now)
                if weight > 0.0:
                    found = _plus(found, _aged(told, weight, now))
        return found

    def sequences(self, worker: WorkerId) -> int:
        """What the others were last known to run on `worker`, whatever its age."""
        told = (replica.told.get(worker) for replica in self._replicas.values())
        return sum(one.load.sequences for one in told if one is not None)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        for replica in self._replicas.values():
            replica.told.pop(worker, None)

    def tick(self, now: float) -> None:
        """Forget replicas that count for nothing any more. Changes no answer."""
        gone = [name for name, replica in self._replicas.items() if self._weight(replica, now) <= 0.0]
        for name in gone:
            del self._replicas[name]

    def heard(self, now: float) -> Iterator[HeardReplica]:
        """All replicas that count, in the order they were first heard."""
        for name, replica in self._replicas.items():
            weight = self._weight(replica, now)
            sequences = sum(told.load.sequences for told in replica.told.values())
            yield HeardReplica(name, replica.epoch, max(0.0, now - replica.heard_at), weight, sequences)

    def _weight(self, replica: _Replica, now: float) -> float:
        left = self._gone_after_s - (now - replica.heard_at)
        return max(0.0, min(1.0, left / (self._gone_after_s - self._fade_after_s)))


def _aged(told: _Told, weight: float, now: float) -> ToldLoad:
    load, passed_ms = told.load, (now - told.at) * 1000.0
    if weight >= 1.0 and not load.queued_prefill_ms:
        return load
    left_ms = max(0.0, load.queued_prefill_ms - passed_ms)
    left = left_ms / load.queued_prefill_ms if load.queued_prefill_ms else 0.0
    return ToldLoad(
        sequences=round(weight * load.sequences),
        prefilling=round(weight * load.prefilling) if left_ms else 0,
        context_tokens=round(weight * load.context_tokens),
        private_tokens=round(weight * load.private_tokens),
        queued_prefill_ms=weight * left_ms,
        queued_prefill_tokens=weight * left * load.queued_prefill_tokens,
        remaining_tokens=weight * load.remaining_tokens,
    )


def _plus(one: ToldLoad, other: ToldLoad) -> ToldLoad:
    if one is NOTHING_TOLD:
        return other
    return ToldLoad(
        one.sequences + other.sequences,
        one.prefilling + other.prefilling,
        one.context_tokens + other.context_tokens,
        one.private_tokens + other.private_tokens,
        one.queued_prefill_ms + other.queued_prefill_ms,
        one.queued_prefill_tokens + other.queued_prefill_tokens,
        one.remaining_tokens + other.remaining_tokens,
    )


def differs(now_is: ToldLoad, told: ToldLoad) -> bool:
    """Whether those who believe `told` should hear that it is `now_is`: small changes of sizes may wait."""
    return (
        now_is.sequences != told.sequences
        or now_is.prefilling != told.prefilling
        or abs(now_is.queued_prefill_ms - told.queued_prefill_ms) > max(5.0, 0.05 * told.queued_prefill_ms)
        or abs(now_is.context_tokens - told.context_tokens) > max(256, 0.05 * told.context_tokens)
    )
