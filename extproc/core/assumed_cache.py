"""What a worker without KV events is assumed to hold: the prefixes we sent there lately.

A prompt that has been served is in the engine's cache until it is evicted, and the engine evicts the least
recently used blocks, the ends of prefixes before their beginnings. So do we, with the size of the engine's
own cache. Only contiguous prefixes ever count, as everywhere. Where the engine reports fewer cached tokens
than were assumed, what it did not find is forgotten.

The blocks live in the `KvIndex` as reservations, beside those of requests in flight; once a worker's first KV
event arrives, its assumptions are dropped, for from then on it is known what it holds.
"""

from collections.abc import Sequence
from itertools import islice

from extproc.core.kv_index import KvIndex
from extproc.core.types import WorkerId

DEFAULT_CAPACITY = 4096
"""Blocks a worker is taken to hold until its metrics tell."""


class AssumedCache:
    """Least recently used prefixes, per worker.

    Args:
        index: where the assumptions are matched.
    """

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._workers: dict[WorkerId, dict[int, None]] = {}  # oldest first

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def blocks(self, worker: WorkerId) -> int:
        """How many blocks `worker` is assumed to hold."""
        return len(self._workers.get(worker, ()))

    def record(self, worker: WorkerId, chain: Sequence[int], capacity: int | None) -> None:
        """`worker` has just served a prompt with these block hashes; its cache holds `capacity` blocks."""
        held = self._workers.setdefault(worker, {})
        self._index.reserve(worker, [block for block in chain if block not in held])
        for block in reversed(chain):  # the beginning of a prefix is evicted last
            held.pop(block, None)
            held[block] = None
        limit = DEFAULT_CAPACITY if capacity is None else capacity
        oldest = list(islice(held, max(0, len(held) - limit)))
        for block in oldest:
            del held[block]
        self._index.unreserve(worker, oldest)

    def forget(self, worker: WorkerId, blocks: Sequence[int]) -> None:
        """The engine did not have these."""
        held = self._workers.get(worker)
        if held:
            gone = [block for block in dict.fromkeys(blocks) if block in held]
            for block in gone:
                del held[block]
            self._index.unreserve(worker, gone)

    def drop(self, worker: WorkerId) -> None:
        """Nothing is assumed of `worker` any more."""
        held = self._workers.pop(worker, None)
        if held:
            self._index.unreserve(worker, tuple(held))

    def remove_worker(self, worker: WorkerId) -> None:
        """The worker has left the index, and its reservations with it."""
        self._workers.pop(worker, None)
