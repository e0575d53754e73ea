"""Stored blocks whose parent is not known: their place in a chain cannot be computed yet.

They are kept, oldest out, until an event makes the parent known; removals of their blocks are kept with
them and take effect in the original order.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field, replace

from extproc.core.types import BlockRemoved, BlockStored, Tier

Handle = int | bytes


@dataclass(slots=True)
class _Waiting:
    serial: int  # age: lower is older
    events: list[BlockStored | BlockRemoved] = field(default_factory=list)
    copies: Counter[tuple[Handle, Tier]] = field(default_factory=Counter)
    live: int = 0  # copies that no removal has cancelled
    blocks: int = 0  # block entries in `events`: what memory is bounded by


class Orphans:
    """Orphans of one engine, by the parent they wait for; at most `limit` block entries."""

    __slots__ = ("_homes", "_limit", "_serial", "_waiting", "blocks", "dropped")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Handle, _Waiting] = {}
        self._homes: dict[Handle, list[Handle]] = {}  # block -> the parents that its events wait for
        self._serial = 0
        self.blocks = 0
        self.dropped = 0

    def __contains__(self, parent: Handle) -> bool:
        return parent in self._waiting

    def add(self, event: BlockStored) -> None:
        """Keep `event` until its parent appears."""
        parent, count = event.parent, len(event.block_hashes)
        if parent is None:
            raise ValueError("a block without parent is no orphan")
        if count > self._limit:
            self.dropped += count
            return
        waiting = self._waiting.get(parent)
        if waiting is None:
            self._serial += 1
            waiting = self._waiting[parent] = _Waiting(self._serial)
        if event.token_ids:
            event = replace(event, token_ids=_packed(event))
        waiting.events.append(event)
        for handle in event.block_hashes:
            homes = self._homes.setdefault(handle, [])
            if parent not in homes:
                homes.append(parent)
            waiting.copies[handle, event.tier] += 1
        waiting.live += count
        waiting.blocks += count
        self.blocks += count
        while self.blocks > self._limit:
            oldest = next(iter(self._waiting))
            self.dropped += self._waiting[oldest].live
            self._forget(oldest)

    def remove(self, handle: Handle, tier: Tier, group: int) -> bool:
        """Note that a copy of an orphan is gone; False if no such copy is waiting."""
        parent = self._oldest_with(handle, tier)
        if parent is None:
            return False
        waiting = self._waiting[parent]
        waiting.copies[handle, tier] -= 1
        waiting.live -= 1
        waiting.events.append(BlockRemoved((handle,), tier, group))
        if not waiting.live:
            self._forget(parent)
        return True

    def take(self, parent: Handle) -> list[BlockStored | BlockRemoved]:
        """The events that waited for `parent`, in their order; they wait no longer."""
        events = self._waiting[parent].events
        self._forget(parent)
        return events

    def clear(self) -> None:
        """Forget everything; the count of dropped blocks stays."""
        self._waiting.clear()
        self._homes.clear()
        self.blocks = 0

    def _forget(self, parent: Handle) -> None:
        waiting = self._waiting.pop(parent)
        self.blocks -= waiting.blocks
        for handle in {handle for handle, _ in waiting.copies}:
            homes = self._homes[handle]
            homes.remove(parent)
            if not homes:
                del self._homes[handle]

    def _oldest_with(self, handle: Handle, tier: Tier) -> Handle | None:
        """The parent, of those waited for the longest, with a live copy of the block among its events."""
        found = [home for home in self._homes.get(handle, ()) if self._waiting[home].copies[handle, tier]]
        return min(found, key=lambda home: self._waiting[home].serial, default=None)


def _packed(event: BlockStored) -> "array[int] | list[int]":
    try:
        return array("I", event.token_ids)
    except (OverflowError, TypeError):
        return []  # impossible token ids: found malformed when the parent appears
