"""Ids of pieces of text, by content: least recently used out first, within a number of bytes."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

_OVERHEAD = 150  # of an entry, beside its text and ids: the dictionary's and the list's nodes


@dataclass(slots=True)
class PieceCacheStats:
    """Counters since the start, and sizes now.

    Attributes:
        known: characters of prompts whose ids were known.
        new: characters that were encoded.
        pieces: texts in the cache.
        size: their bytes, ids included, about.
        evicted: texts dropped to make room.
    """

    known: int = 0
    new: int = 0
    pieces: int = 0
    size: int = 0
    evicted: int = 0

    def begin(self) -> None:
        """Count from now on: for when nobody encodes."""
        self.known = self.new = self.evicted = 0


class PieceCache:
    """Token ids, as bytes of 4-byte integers, by text. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self.stats = PieceCacheStats()

    def find(self, pieces: Sequence[str]) -> list[bytes | None]:
        """Ids of each piece, None where they are not known."""
        with self._lock:
            found = list(map(self._entries.get, pieces))
            touch = self._entries.move_to_end
            for piece, ids in zip(pieces, found, strict=True):
                if ids is not None:
                    touch(piece)
        return found

    def keep(self, pieces: Sequence[str], ids: Sequence[bytes]) -> None:
        """Remember ids of pieces, but none of over a quarter of the limit: it would displace too much."""
        entries, stats = self._entries, self.stats
        with self._lock:
            for piece, own in zip(pieces, ids, strict=True):
                size = _size(piece, own)
                if piece in entries or size > self._limit // 4:
                    continue
                entries[piece] = own
                stats.size += size
            while stats.size > self._limit:
                stats.size -= _size(*entries.popitem(last=False))
                stats.evicted += 1
            stats.pieces = len(entries)

    def count(self, *, known: int, new: int) -> None:
        """Characters of a prompt."""
        with self._lock:
            self.stats.known += known
            self.stats.new += new


def _size(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + _OVERHEAD
