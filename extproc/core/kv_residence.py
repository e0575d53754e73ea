"""Which blocks one engine holds, told by its own events.

The engine's block hash is a handle: it is bound to our chained hash when a block is stored, and forgotten
when the last copy of the block is gone, so memory is bounded by live blocks.

Copies are counted, because vLLM does not deduplicate: two requests that compute the same block at the same
time store it twice, and evict it twice. The count of a handle packs one field per tier; the common case, one
copy on the GPU, is not stored at all. (A client that asks vLLM to *report* reused blocks, with
`kv_cache_report_mode: full`, makes it publish stores that are no new copies; on the wire they look the same,
and the surplus stays until the cache is cleared. The audit of predicted against actual hits shows it.)

Hybrid models keep several groups of layers, each with its own blocks under the same handles. A prefix is
reusable when every group still has what it needs; full attention needs all of it, a sliding window only its
end. So the first full-attention group seen on the GPU is the one that counts, and the events of all other
groups are skipped. Engines that do not name the kind of a group (before vLLM 0.22) are taken at their first
group. A model with sliding windows only therefore never counts as warm.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from extproc.core.kv_chain import EventHashes, event_chain
from extproc.core.kv_orphans import Handle, Orphans
from extproc.core.types import BlockRemoved, BlockStored, Tier

CONFIRMED, RESERVED, OFFLOADED = 1, 2, 4
"""State of one block on one worker: copies on the GPU, prompts in flight, copies in a slower tier."""

_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_FIELD = 20  # bits per tier in a count of copies
_FIELD_MASK = (1 << _FIELD) - 1
_UNIT = (1, 1 << _FIELD, 1 << 2 * _FIELD)  # by tier
_INTERNED_MAX = 65_536
_NUMBER_BYTES = 36  # of a Python integer of 64 bits


def map_bytes(of: "dict[int, int] | dict[Handle, int]") -> int:
    """Estimated memory of a map: its table, and 36 bytes for each key, which is a number of 64 bits."""
    return sys.getsizeof(of) + _NUMBER_BYTES * len(of)


class BlockStates:
    """For every block, the state on every worker: 3 bits for each, worker i from bit 3 * i on.

    Equal states share one integer object: a map of a million blocks holds a handful of them, and comparing
    two neighbours is comparing two pointers.
    """

    __slots__ = ("_interned", "of")

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self._interned: dict[int, int] = {}

    @property
    def memory_bytes(self) -> int:
        """Estimated memory."""
        return map_bytes(self.of)

    def add(self, block: int, bit: int) -> None:
        """Set `bit` of `block`."""
        state = self.of.get(block, 0) | bit
        self.of[block] = self._interned.setdefault(state, state)
        if len(self._interned) > _INTERNED_MAX:
            self._interned.clear()

    def drop(self, block: int, bits: int) -> None:
        """Clear `bits` of `block`; a block nobody has is forgotten."""
        state = self.of.get(block, 0) & ~bits
        if state:
            self.of[block] = self._interned.setdefault(state, state)
        else:
            self.of.pop(block, None)


class EngineBlocks:
    """The blocks of one engine; keeps the worker's CONFIRMED and OFFLOADED bits of `states` up to date."""

    __slots__ = (
        "_confirmed",
        "_copies",
        "_event_hashes",
        "_group",
        "_handles",
        "_offloaded",
        "_revisions",
        "_states",
        "_totals",
        "block_size",
        "ignored_groups",
        "malformed",
        "orphans",
        "unknown_offloads",
        "unknown_removes",
    )

    def __init__(
        self,
        states: BlockStates,
        slot: int,
        model_revision: str,
        tokenizer_revision: str,
        max_orphans: int,
        event_hashes: EventHashes = event_chain,
    ) -> None:
        self._states = states
        self._confirmed = CONFIRMED << 3 * slot
        self._offloaded = OFFLOADED << 3 * slot
        self._revisions = (model_revision, tokenizer_revision)
        self._event_hashes = event_hashes
        self._handles: dict[Handle, int] = {}
        # Copies of a handle, and of a block over all its handles (an adapter that was loaded again from
        # another path has new handles for the same blocks). Absent: one copy, on the GPU.
        self._copies: dict[Handle, int] = {}
        self._totals: dict[int, int] = {}
        self._group: int | None = None
        self.orphans = Orphans(max_orphans)
        self.block_size: int | None = None
        self.ignored_groups = 0
        self.malformed = 0
        self.unknown_offloads = 0
        self.unknown_removes = 0

    @property
    def blocks(self) -> int:
        """Engine blocks (handles) held in any tier."""
        return len(self._handles)

    @property
    def copies(self) -> tuple[int, int]:
        """Physical copies on the GPU, and in slower tiers."""
        gpu = len(self._handles) - len(self._copies)
        slower = 0
        for count in self._copies.values():
            gpu += count & _FIELD_MASK
            slower += (count >> _FIELD & _FIELD_MASK) + (count >> 2 * _FIELD)
        return gpu, slower

    def confirmed(self) -> Iterator[int]:
        """Blocks held in any tier, once for each handle; the oldest first."""
        return iter(self._handles.values())

    def block_of(self, handle: Handle) -> int | None:
        """The block behind a handle, if it is held."""
        return self._handles.get(handle)

    def forget(self, handle: Handle) -> None:
        """Every copy of a block is gone, and no event told of it."""
        block = self._handles.get(handle)
        if block is not None:
            self._change(handle, block, -self._copies.get(handle, 1))

    @property
    def memory_bytes(self) -> int:
        """Estimated memory, without that of the orphans."""
        return map_bytes(self._handles) + map_bytes(self._copies) + map_bytes(self._totals)

    def clear(self) -> None:
        """Everything is gone, in every tier."""
        bits = self._confirmed | self._offloaded
        drop = self._states.drop
        for block in self._handles.values():
            drop(block, bits)
        self._handles.clear()
        self._copies.clear()
        self._totals.clear()
        self.orphans.clear()
        self._group = None
        self.block_size = None

    def store(self, event: BlockStored) -> None:
        """Blocks became reusable in `event.tier`."""
        if not event.block_hashes:
            return
        if not self._counts(event):
            self.ignored_groups += 1
            return
        handles = self._handles
        told = event.chained or event.token_ids
        if not told or all(handle in handles for handle in event.block_hashes):
            self._store_again(event)
            return
        if event.parent is None:
            self._attach(event, None)
        elif event.parent in handles:
            self._attach(event, handles[event.parent])
        elif event.block_hashes[0] in handles:
            self._attach_rest(event)
        else:
            self.orphans.add(event)

    def remove(self, event: BlockRemoved) -> None:
        """One copy of each block is gone from `event.tier`."""
        if self._group is not None and event.group != self._group:
            self.ignored_groups += 1
            return
        tier = event.tier
        unit, shift = _UNIT[tier], _FIELD * tier
        for handle in event.block_hashes:
            block = self._handles.get(handle)
            if block is not None and self._copies.get(handle, 1) >> shift & _FIELD_MASK:
                self._change(handle, block, -unit)
            elif not self.orphans.remove(handle, tier, event.group):
                self.unknown_removes += 1

    def _counts(self, event: BlockStored) -> bool:
        """Whether the event's group is the one that decides; elects it if none is known yet."""
        if self._group is None:
            if event.spec_kind is None:
                # A placeholder from a slower tier names no kind: it must not elect the group.
                if event.tier is not Tier.GPU:
                    return True
            elif event.spec_kind not in _FULL_ATTENTION:
                return False
            self._group = event.group
        return event.group == self._group

    def _store_again(self, event: BlockStored) -> None:
        """More copies of known blocks; nothing can be said about unknown ones."""
        unit = _UNIT[event.tier]
        for handle in event.block_hashes:
            block = self._handles.get(handle)
            if block is not None:
                self._change(handle, block, unit)
            elif event.tier is Tier.GPU:
                self.malformed += 1
            else:
                self.unknown_offloads += 1

    def _attach_rest(self, event: BlockStored) -> None:
        """Blocks of which the leading ones are known, though their parent is gone."""
        known = next(at for at, handle in enumerate(event.block_hashes) if handle not in self._handles)
        if not event.chained and len(event.token_ids) != len(event.block_hashes) * event.block_size:
            self.malformed += 1
            return
        last = event.block_hashes[known - 1]
        self._store_again(replace(event, block_hashes=event.block_hashes[:known]))
        rest = replace(
            event,
            block_hashes=event.block_hashes[known:],
            parent=last,
            token_ids=event.token_ids[known * event.block_size :],
            extra_keys=None if event.extra_keys is None else event.extra_keys[known:],
        )
        self._attach(rest, self._handles[last])

    def _attach(self, event: BlockStored, parent: int | None) -> None:
        """Bind the event's blocks below `parent`, then the orphans that were waiting for them, and theirs."""
        known = self._bind(event, parent)
        if not self.orphans.blocks:
            return
        found = deque(known)
        late: list[BlockRemoved] = []
        while found:
            handle, block = found.popleft()
            if handle not in self.orphans:
                continue
            for waiting in self.orphans.take(handle):
                if isinstance(waiting, BlockStored):
                    found.extend(self._bind(waiting, block))
                else:
                    late.append(waiting)
        for removal in late:
            self.remove(removal)

    def _bind(self, event: BlockStored, parent: int | None) -> Sequence[tuple[Handle, int]]:
        """Count one copy more of each block of `event`; the blocks with their hashes."""
        blocks = self._event_hashes(event, parent, *self._revisions)
        if blocks is None:
            self.malformed += 1
            return ()
        on_gpu = event.tier is Tier.GPU
        if on_gpu and (self.block_size is None or event.block_size > self.block_size):
            self.block_size = event.block_size
        bit = self._confirmed if on_gpu else self._offloaded
        mine = self._confirmed | self._offloaded
        unit = _UNIT[event.tier]
        handles, states, add = self._handles, self._states.of, self._states.add
        for handle, block in zip(event.block_hashes, blocks, strict=True):
            known = handles.get(handle)
            if known is not None:
                self._change(handle, known, unit)
                continue
            handles[handle] = block
            if not on_gpu:
                self._copies[handle] = unit
            if states.get(block, 0) & mine:
                self._totals[block] = self._totals.get(block, 1) + unit
            elif not on_gpu:
                self._totals[block] = unit
            add(block, bit)
        return list(zip(event.block_hashes, blocks, strict=True)) if self.orphans.blocks else ()

    def _change(self, handle: Handle, block: int, unit: int) -> None:
        """One copy more or less of a known block."""
        own = self._copies.get(handle, 1) + unit
        if own > 1:
            self._copies[handle] = own
        else:
            self._copies.pop(handle, None)
            if not own:
                del self._handles[handle]
        total = self._totals.get(block, 1) + unit
        if total > 1:
            self._totals[block] = total
        else:
            self._totals.pop(block, None)
        gone = 0 if total & _FIELD_MASK else self._confirmed
        if not total >> _FIELD:
            gone |= self._offloaded
        if unit > 0:
            self._states.add(block, (self._confirmed | self._offloaded) ^ gone)
        else:
            self._states.drop(block, gone)
