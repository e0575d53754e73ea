"""What a worker without KV events is assumed to hold: the prefixes we sent there lately.

Theory of operation. The engine keeps blocks that no running request uses in a queue, the least recently used
first, and takes new blocks from its head. So do we, with the engine's own number of blocks:

* a request on its way takes the blocks it finds out of the queue, and as many from its head as it will need
  beside them (`admit`);
* when it has ended (`done`, `record`) its blocks join the tail: first those of its answer, which nobody can
  ask for by name but which take up room all the same; then the prompt's, the end before the beginning.

Only contiguous prefixes ever count, as everywhere. Where the engine reports fewer cached tokens than were
assumed, what it did not find is forgotten. What was not used for the lifetime is forgotten as well: others
may use the engine too.

The blocks live in the `KvIndex` as reservations, beside those of requests in flight; once a worker's first KV
event arrives, its assumptions are dropped, for from then on it is known what it holds. Source of the order:
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
    queue: dict[int, float] = field(default_factory=dict)  # unused blocks and when they were; oldest first
    used: dict[int, int] = field(default_factory=dict)  # blocks of running requests -> by how many
    mine: set[int] = field(default_factory=set)  # reserved by us: in the queue, or back there later
    running: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict)  # chain, further blocks
    further: int = 0  # of all running requests
    answers: int = 0  # blocks of answers so far: they get negative names


class AssumedCache:
    """Least recently used prefixes, per worker.

    Args:
        index: where the assumptions are matched.
    """

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._workers: dict[WorkerId, _Cache] = {}

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def blocks(self, worker: WorkerId) -> int:
        """How many blocks of prompts `worker` is assumed to hold."""
        cache = self._workers.get(worker)
        return 0 if cache is None else len(cache.mine)

    def admit(
        self, worker: WorkerId, ticket: str, chain: Sequence[int], blocks: int, capacity: int | None
    ) -> None:
        """A request is on its way to `worker`.

        Args:
            worker: where to.
            ticket: names the request until it is `done`.
            chain: block hashes of its prompt.
            blocks: how many it will use in all.
            capacity: how many the engine has; None: not known.
        """
        cache = self._workers.setdefault(worker, _Cache())
        for block in chain:
            cache.queue.pop(block, None)
            cache.used[block] = cache.used.get(block, 0) + 1
        further = max(0, blocks - len(chain))
        cache.further += further
        cache.running[ticket] = (chain, further)
        self._evict(worker, cache, capacity)

    def done(self, worker: WorkerId, ticket: str, now: float) -> None:
        """The request is no longer there, whatever became of it. Unknown tickets are ignored."""
        cache = self._workers.get(worker)
        running = None if cache is None else cache.running.pop(ticket, None)
        if cache is None or running is None:
            return
        chain, further = running
        cache.further -= further
        for block in reversed(chain):
            left = cache.used[block] - 1
            if left:
                cache.used[block] = left
                continue
            del cache.used[block]
            if block in cache.mine:
                cache.queue[block] = now

    def record(
        self, worker: WorkerId, chain: Sequence[int], capacity: int | None, now: float, answer_blocks: int = 0
    ) -> None:
        """`worker` has just served a prompt with these block hashes, and an answer of so many blocks more."""
        cache = self._workers.setdefault(worker, _Cache())
        new = [block for block in dict.fromkeys(chain) if block not in cache.mine]
        self._index.reserve(worker, new)
        cache.mine.update(new)
        for _ in range(answer_blocks):
            cache.answers += 1
            cache.queue[-cache.answers] = now
        for block in reversed(chain):
            cache.queue.pop(block, None)
            if block not in cache.used:
                cache.queue[block] = now
        self._evict(worker, cache, capacity)

    def forget(self, worker: WorkerId, blocks: Sequence[int]) -> None:
        """The engine did not have these."""
        cache = self._workers.get(worker)
        if cache is not None:
            gone = [block for block in dict.fromkeys(blocks) if block in cache.mine]
            for block in gone:
                cache.mine.discard(block)
                cache.queue.pop(block, None)
            self._index.unreserve(worker, gone)

    def expire(self, now: float) -> None:
        """Forget what was not used for the lifetime."""
        for worker, cache in self._workers.items():
            stale = []
            for block, at in cache.queue.items():
                if now - at < LIFETIME_S:
                    break
                stale.append(block)
            self._take(worker, cache, stale)

    def drop(self, worker: WorkerId) -> None:
        """Nothing is assumed of `worker` any more."""
        cache = self._workers.pop(worker, None)
        if cache is not None:
            self._index.unreserve(worker, tuple(cache.mine))

    def remove_worker(self, worker: WorkerId) -> None:
        """The worker has left the index, and its reservations with it."""
        self._workers.pop(worker, None)

    def _evict(self, worker: WorkerId, cache: _Cache, capacity: int | None) -> None:
        limit = DEFAULT_CAPACITY if capacity is None else capacity
        room = max(0, limit - len(cache.used) - cache.further)
        surplus = len(cache.queue) - room
        if surplus > 0:
            oldest = iter(cache.queue)
            self._take(worker, cache, [next(oldest) for _ in range(surplus)])

    def _take(self, worker: WorkerId, cache: _Cache, blocks: Sequence[int]) -> None:
        """Take blocks out of the queue."""
        for block in blocks:
            del cache.queue[block]
        prompts = [block for block in blocks if block in cache.mine]
        cache.mine.difference_update(prompts)
        self._index.unreserve(worker, prompts)
