"""What a replica tells the others: the other side of `extproc.core.peer_loads`.

Theory of operation. At every look the loads of all workers are compared with what a listener believes by now
(told values age, see there), and those that differ get the number of the look. A listener is told everything
that has changed since the number it heard last, or, now and then, everything. Nothing is queued for a
listener: one that is slow hears fewer, later messages, each true when it was made.

Prefixes on their way to workers are kept for a while, the last `MAX_BLOCKS` blocks of them. Whoever was not
listening then misses them; KV events will tell.
"""

from collections import deque
from collections.abc import Iterable

from extproc.core.leases import Lease, WorkerLoad
from extproc.core.peer_loads import (
    NOTHING_TOLD,
    PeerNews,
    SentPrefix,
    ToldLoad,
    differs,
)
from extproc.core.types import WorkerId

MAX_BLOCKS = 32_768  # that one message may tell of, and one teller keeps: 256 KiB
MAX_PREFIX = 8192  # blocks told of one prompt, from its first
MIN_NEW = 0.125  # share of a prompt that has to be computed: else telling of it costs more than it saves
EVENT_DELAY_S = 1.0  # from the end of a prefill until its KV events are surely here
MAX_LIFETIME_S = 60.0


class LoadTeller:
    """Makes the messages of one replica.

    Args:
        replica: our name.
        epoch: of this start; higher than those of earlier ones.
    """

    def __init__(self, replica: str, epoch: int) -> None:
        self.replica = replica
        self.epoch = epoch
        self.number = 0
        self._told: dict[WorkerId, tuple[int, ToldLoad, float]] = {}  # number, value, time
        self._now: dict[WorkerId, ToldLoad] = {}
        self._sent: deque[tuple[int, SentPrefix]] = deque()
        self._sent_blocks = 0

    def sent(self, lease: Lease, now: float) -> None:
        """A request goes to its worker: what has to be computed of its prompt will be there."""
        size = lease.candidate.block_size
        if size is None or len(lease.reserved) != 1:
            return
        chain = lease.reserved[0]
        known = (lease.candidate.cached_tokens + lease.candidate.offloaded_tokens) // size
        if len(chain) - known < max(1.0, MIN_NEW * len(chain)):
            return
        hashes = tuple(chain[:MAX_PREFIX])
        lifetime_s = min(MAX_LIFETIME_S, max(0.0, lease.prefill_end - now) + EVENT_DELAY_S)
        self._sent.append((self.number + 1, SentPrefix(lease.worker, hashes, lifetime_s)))
        self._sent_blocks += len(hashes)
        while self._sent_blocks > MAX_BLOCKS:
            self._sent_blocks -= len(self._sent.popleft()[1].hashes)

    def look(self, loads: Iterable[tuple[WorkerId, ToldLoad]], now: float) -> None:
        """Loads of all members as they are; what is told from now on is true as of now."""
        self.number += 1
        self._now = dict(loads)
        for worker in [worker for worker in self._told if worker not in self._now]:
            del self._told[worker]
        for worker, load in self._now.items():
            _, told, at = self._told.get(worker, (0, NOTHING_TOLD, now))
            waited = max(0.0, told.queued_prefill_ms - (now - at) * 1000.0)
            if differs(load, told._replace(queued_prefill_ms=waited)):
                self._told[worker] = (self.number, load, now)

    def snapshot(self) -> PeerNews:
        """Everything, for a listener that knows nothing, or may have missed something."""
        loads = tuple((worker, load) for worker, load in self._now.items() if load != NOTHING_TOLD)
        return PeerNews(self.replica, self.epoch, self.number, whole=True, loads=loads)

    def since(self, number: int) -> PeerNews:
        """What has changed since message `number`, of this epoch."""
        loads = tuple((worker, load) for worker, (at, load, _) in self._told.items() if at > number)
        sent = tuple(one for at, one in self._sent if number < at <= self.number)
        return PeerNews(self.replica, self.epoch, self.number, whole=False, loads=loads, sent=sent)


def told_load(load: WorkerLoad, remaining_tokens: float) -> ToldLoad:
    """What a ledger has on a worker, as it is told; `NOTHING_TOLD` itself when that is nothing."""
    if not load.active:
        return NOTHING_TOLD
    return ToldLoad(
        sequences=load.sequences,
        prefilling=load.prefilling,
        context_tokens=load.context_tokens,
        private_tokens=load.private_tokens,
        queued_prefill_ms=load.queued_prefill_ms,
        queued_prefill_tokens=load.queued_prefill_tokens,
        remaining_tokens=remaining_tokens,
    )
