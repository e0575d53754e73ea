"""What a worker without KV events is assumed to hold: the prefixes we sent there lately.

Theory of operation. The engine keeps blocks that no running request uses in a queue, the least recently used
first, and takes new blocks from its head. So do we, with the engine's own number of blocks:

* a request on its way takes the blocks it finds out of the queue (its reservation does), and as many from its
  head as it will need beside them (`admit`);
* when it has ended its blocks join the tail: first those of its answer, which nobody can ask for by name but
  which take up room all the same (`record`); then the prompt's, the end before the beginning.

Only contiguous prefixes ever count, as everywhere. Where the engine reports fewer cached tokens than were
assumed, what goes on from there and was not used since is forgotten: the engine gives up the end before the
beginning. What was not used for the lifetime is forgotten as well: others may use the engine too.

The queue is kept per stretch of blocks, in the tree of `extproc.core.kv_reservations`. Once a worker's first
KV event arrives, its assumptions are dropped: from then on it is known what it holds. Source of the order:
`vllm/v1/core/block_pool.py` (0.32).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from extproc.core.kv_index import KvIndex
from extproc.core.types import WorkerId

DEFAULT_CAPACITY = 4096
"""Blocks a worker is taken to hold until its metrics tell."""

LIFETIME_S = 3600.0


@dataclass(slots=True)
class _Cache:
    running: dict[str, int] = field(default_factory=dict)  # blocks that requests need beside their prompts
    further: int = 0  # of all of them


class AssumedCache:
    """Least recently used prefixes, per worker.

    Args:
        index: where the assumptions are kept and matched.
    """

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._sent = index.sent
        self._workers: dict[WorkerId, _Cache] = {}

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def blocks(self, worker: WorkerId) -> int:
        """How many blocks of prompts `worker` is assumed to hold."""
        slot = self._index.slot(worker) if worker in self._workers else None
        return 0 if slot is None else self._sent.of(slot).assumed

    def admit(self, worker: WorkerId, ticket: str, further: int, capacity: int | None) -> None:
        """A request is on its way to `worker`, and its prompt is reserved there.

        Args:
            worker: where to.
            ticket: names the request until it is `done`.
            further: blocks it will use beside those of its prompt.
            capacity: how many the engine has; None: not known.
        """
        cache = self._workers.setdefault(worker, _Cache())
        self.done(worker, ticket)
        cache.further += further
        cache.running[ticket] = further
        self._evict(worker, cache, capacity)

    def done(self, worker: WorkerId, ticket: str) -> None:
        """The request is no longer there, whatever became of it. Unknown tickets are ignored."""
        cache = self._workers.get(worker)
        if cache is not None:
            cache.further -= cache.running.pop(ticket, 0)

    def record(
        self, worker: WorkerId, chain: Sequence[int], capacity: int | None, now: float, answer_blocks: int = 0
    ) -> None:
        """`worker` has just served a prompt with these block hashes, and an answer of so many blocks more."""
        slot = self._index.slot(worker)
        if slot is None:
            return
        cache = self._workers.setdefault(worker, _Cache())
        self._sent.assume(slot, chain, now, answer_blocks)
        self._evict(worker, cache, capacity)

    def forget(self, worker: WorkerId, chain: Sequence[int], held: int, since: float) -> None:
        """The engine had only the first `held` blocks of `chain`, and what others have used `since`."""
        slot = self._index.slot(worker)
        if slot is not None and worker in self._workers:
            self._sent.forget(slot, chain, held, since)

    def expire(self, now: float) -> None:
        """Forget what was not used for the lifetime."""
        for worker in self._workers:
            slot = self._index.slot(worker)
            if slot is not None:
                self._sent.expire(slot, now - LIFETIME_S)

    def drop(self, worker: WorkerId) -> None:
        """Nothing is assumed of `worker` any more."""
        slot = self._index.slot(worker)
        if self._workers.pop(worker, None) is not None and slot is not None:
            self._sent.drop_assumed(slot)

    def remove_worker(self, worker: WorkerId) -> None:
        """The worker has left the index, and its reservations with it."""
        self._workers.pop(worker, None)

    def _evict(self, worker: WorkerId, cache: _Cache, capacity: int | None) -> None:
        slot = self._index.slot(worker)
        if slot is None:
            return
        held = self._sent.of(slot)
        limit = DEFAULT_CAPACITY if capacity is None else capacity
        surplus = held.waiting - max(0, limit - held.in_use - cache.further)
        if surplus > 0:
            self._sent.evict(slot, surplus)
        over = self._index.surplus
        if over:
            self._index.given_up += self._sent.shrink(over)
