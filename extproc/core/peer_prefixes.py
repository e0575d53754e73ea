"""Prefixes that other replicas have sent to workers: counted as there until KV events can tell.

Without them a burst of requests with one new prefix, split over replicas, would be computed once for each of
them: nobody would know yet where the others have sent it. They are reservations in the index like our own,
but nobody takes them back: each ends by itself after the time its replica gave. At most `MAX_BLOCKS` blocks
are kept; what comes beyond is left out and counted.
"""

import contextlib
from collections.abc import Iterable

from extproc.core.kv_index import KvIndex
from extproc.core.peer_loads import SentPrefix
from extproc.core.types import WorkerId

MAX_BLOCKS = 131_072
MAX_LIFETIME_S = 60.0


class PeerPrefixes:
    """Reservations of other replicas, by worker.

    Args:
        index: where they count; workers that are not in it are passed over.
    """

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self._kept: dict[WorkerId, list[tuple[float, tuple[int, ...]]]] = {}
        self.blocks = 0
        self.left_out = 0  # blocks, since the start

    def take(self, sent: Iterable[SentPrefix], now: float) -> None:
        """Other replicas have sent these to their workers."""
        for one in sent:
            if one.worker not in self._index or not one.hashes:
                continue
            if self.blocks + len(one.hashes) > MAX_BLOCKS:
                self.left_out += len(one.hashes)
                continue
            self._index.reserve(one.worker, one.hashes)
            ends = now + min(MAX_LIFETIME_S, max(0.0, one.lifetime_s))
            self._kept.setdefault(one.worker, []).append((ends, one.hashes))
            self.blocks += len(one.hashes)

    def tick(self, now: float) -> None:
        """End those whose time is up."""
        for worker, kept in list(self._kept.items()):
            left = []
            for ends, hashes in kept:
                if ends > now:
                    left.append((ends, hashes))
                else:
                    self._end(worker, hashes, now)
            if left:
                self._kept[worker] = left
            else:
                del self._kept[worker]

    def _end(self, worker: WorkerId, hashes: tuple[int, ...], now: float) -> None:
        self.blocks -= len(hashes)
        with contextlib.suppress(ValueError):  # hashes that are no chain: the index has kept what it could
            self._index.unreserve(worker, hashes, now)

    def forget(self, worker: WorkerId) -> None:
        """The worker has left the index, or is there anew: its reservations are gone."""
        self.blocks -= sum(len(hashes) for _, hashes in self._kept.pop(worker, ()))
