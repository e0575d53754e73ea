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

An engine is **regular** while it holds no block without all those before it (see `extproc.core.kv_runs`), and
has no copies in slower tiers. Then one look at a block tells that all before it are there.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from extproc.core.kv_chain import EventHashes, event_chain
from extproc.core.kv_orphans import Handle, Orphans
from extproc.core.kv_runs import Runs
from extproc.core.kv_states import CONFIRMED, OFFLOADED, WIDTH, BlockStates, map_bytes
from extproc.core.types import BlockRemoved, BlockStored, Tier

_FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_FIELD = 20  # bits per tier in a count of copies
_FIELD_MASK = (1 << _FIELD) - 1
_UNIT = (1, 1 << _FIELD, 1 << 2 * _FIELD)  # by tier


class EngineBlocks:
    """The blocks of one engine; keeps the worker's CONFIRMED and OFFLOADED bits of `states` up to date."""

    __slots__ = (
        "_confirmed",
        "_copies",
        "_event_hashes",
        "_handles",
        "_odd",
        "_offloaded",
        "_revisions",
        "_slower",
        "_states",
        "_totals",
        "_unreported",
        "block_size",
        "evicted",
        "group",
        "ignored_groups",
        "malformed",
        "orphans",
        "runs",
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
        self._confirmed = CONFIRMED << WIDTH * slot
        self._offloaded = OFFLOADED << WIDTH * slot
        self._revisions = (model_revision, tokenizer_revision)
        self._event_hashes = event_hashes
        self._handles: dict[Handle, int] = {}
        # Copies of a handle, and of a block over all its handles (an adapter that was loaded again from
        # another path has new handles for the same blocks). Absent: one copy, on the GPU.
        self._copies: dict[Handle, int] = {}
        self._totals: dict[int, int] = {}
        self._slower = 0  # handles with copies in slower tiers
        self._odd = False  # whether blocks hang together in another way than their handles
        self.group: int | None = None
        self.runs = Runs(states.ages, self._give_up)
        self.evicted = 0
        self._unreported = 0  # of those, whose removal the engine may still tell
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

    def held(self, handles: Iterable[Handle]) -> dict[Handle, int]:
        """The blocks behind those of these handles that are held."""
        known = self._handles
        return {handle: known[handle] for handle in handles if handle in known}

    def forget(self, handle: Handle) -> None:
        """Every copy of a block is gone, and no event told of it."""
        block = self._handles.get(handle)
        if block is not None:
            self._change(handle, block, -self._copies.get(handle, 1))

    def _give_up(self, handle: Handle) -> int:
        """Forget a block as if the engine had removed every copy; how much less there is to keep now."""
        before = self._states.entries
        self.forget(handle)
        self.evicted += 1
        self._unreported += 1
        return before - self._states.entries

    @property
    def memory_bytes(self) -> int:
        """Estimated memory, without that of the orphans."""
        maps = map_bytes(self._handles) + map_bytes(self._copies) + map_bytes(self._totals)
        return maps + self.runs.memory_bytes(len(self._handles))

    def holds(self, handle: Handle) -> bool:
        """Whether the engine holds what it means by `handle`, in any tier."""
        return handle in self._handles

    def blocks_at(self, handles: Iterable[Handle]) -> tuple[int, ...]:
        """The blocks behind handles that are held."""
        return tuple(map(self._handles.__getitem__, handles))

    def copies_at(self, handles: Sequence[Handle]) -> tuple[tuple[int, int], ...]:
        """Where there is something else than one copy on the GPU: (place among the handles, packed count)."""
        counts = self._copies
        if not counts or counts.keys().isdisjoint(handles):
            return ()
        return tuple((at, counts[handle]) for at, handle in enumerate(handles) if handle in counts)

    def bind_known(
        self,
        parent: Handle | None,
        handles: Sequence[Handle],
        blocks: Sequence[int],
        counts: list[int] | None,
    ) -> None:
        """Take over a run of blocks that another has bound; `counts` of copies, None: one each, on the GPU.

        What hangs below a handle that is not held has a hole before it.
        """
        if parent is not None and parent not in self._handles:
            self._odd = True
            parent = None
        if counts is None and self._bind_new(parent, handles, blocks):
            self._note_regularity()
            return
        for handle, block, count in zip(handles, blocks, counts or repeat(1), strict=False):
            self._handles[handle] = block
            if count != 1:
                self._copies[handle] = count
                self._slower += count >> _FIELD > 0
            total = count
            if self._states.of.get(block, 0) & (self._confirmed | self._offloaded):
                total += self._totals.get(block, 1)
            if total != 1:
                self._totals[block] = total
            gone = 0 if total & _FIELD_MASK else self._confirmed
            if not total >> _FIELD:
                gone |= self._offloaded
            self._states.add(block, (self._confirmed | self._offloaded) ^ gone)
        self.runs.add(parent, handles)
        self._states.entries += len(handles)
        self._note_regularity()

    def clear(self) -> None:
        """Everything is gone, in every tier."""
        bits = self._confirmed | self._offloaded
        drop = self._states.drop
        for block in self._handles.values():
            drop(block, bits)
        self._states.entries -= len(self._handles) + len(self.runs.gone)
        self._handles.clear()
        self._copies.clear()
        self._totals.clear()
        self.orphans.clear()
        self.runs.clear()
        self._slower, self._odd, self._unreported = 0, False, 0
        self._note_regularity()
        self.group = None
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
        first = event.block_hashes[0]
        if not told or (first in handles and all(map(handles.__contains__, event.block_hashes))):
            self._store_again(event)
            return
        if event.parent is None:
            self._attach(event, None)
        elif event.parent in handles:
            self._attach(event, handles[event.parent])
        elif first in handles:
            self._attach_rest(event)
        else:
            self.orphans.add(event)

    def remove(self, event: BlockRemoved) -> None:
        """One copy of each block is gone from `event.tier`."""
        if self.group is not None and event.group != self.group:
            self.ignored_groups += 1
            return
        tier = event.tier
        unit, shift = _UNIT[tier], _FIELD * tier
        copies, totals = self._copies, self._totals
        for handle in event.block_hashes:
            block = self._handles.get(handle)
            if block is not None and not tier and handle not in copies and block not in totals:
                self._drop_only_copy(handle, block)
            elif block is not None and copies.get(handle, 1) >> shift & _FIELD_MASK:
                self._change(handle, block, -unit)
            elif not self.orphans.remove(handle, tier, event.group):
                if self._unreported:
                    self._unreported -= 1
                else:
                    self.unknown_removes += 1

    def _counts(self, event: BlockStored) -> bool:
        """Whether the event's group is the one that decides; elects it if none is known yet."""
        if self.group is None:
            if event.spec_kind is None:
                # A placeholder from a slower tier names no kind: it must not elect the group.
                if event.tier is not Tier.GPU:
                    return True
            elif event.spec_kind not in _FULL_ATTENTION:
                return False
            self.group = event.group
        return event.group == self.group

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
        if not (on_gpu and self._bind_new(event.parent, event.block_hashes, blocks)):
            self._bind_each(event, blocks)
        return list(zip(event.block_hashes, blocks, strict=True)) if self.orphans.blocks else ()

    def _bind_new(self, parent: Handle | None, found: Sequence[Handle], blocks: Sequence[int]) -> bool:
        """Bind blocks that are all new here and look alike elsewhere, at once; False if they are not so."""
        states, handles = self._states, self._handles
        if not handles.keys().isdisjoint(found):
            return False
        gone = self.runs.gone
        if gone and not gone.keys().isdisjoint(found):
            return False
        state = states.of.get(blocks[0], 0)
        if not state:
            if not states.of.keys().isdisjoint(blocks):
                return False
        elif state & (self._confirmed | self._offloaded) or any(
            states.of.get(block) != state for block in blocks
        ):
            return False
        before = len(handles)
        handles.update(zip(found, blocks, strict=True))
        if len(handles) != before + len(found):  # one is there twice
            for handle in found:
                handles.pop(handle, None)
            return False
        states.put(blocks, state | self._confirmed)
        states.entries += len(found)
        self.runs.add(parent, found)
        return True

    def _bind_each(self, event: BlockStored, blocks: Sequence[int]) -> None:
        """Bind blocks one by one."""
        on_gpu = event.tier is Tier.GPU
        bit = self._confirmed if on_gpu else self._offloaded
        mine = self._confirmed | self._offloaded
        unit = _UNIT[event.tier]
        handles, states, add = self._handles, self._states.of, self._states.add
        parent: Handle | None = event.parent
        fresh: list[Handle] = []  # below `parent`, with no place yet
        for handle, block in zip(event.block_hashes, blocks, strict=True):
            known = handles.get(handle)
            if known is not None:
                self._odd |= known != block
                self._change(handle, known, unit)
            else:
                handles[handle] = block
                self._states.entries += 1
                if not on_gpu:
                    self._copies[handle] = unit
                    self._slower += 1
                if states.get(block, 0) & mine:
                    self._totals[block] = self._totals.get(block, 1) + unit
                elif not on_gpu:
                    self._totals[block] = unit
                add(block, bit)
            gone = None if known is not None else self.runs.gone.pop(handle, None)
            if known is None and gone is None:
                fresh.append(handle)
                continue
            if known is None:
                self._states.entries -= 1  # the hole
                self._odd |= gone != block
            if fresh:
                self.runs.add(parent, fresh)
                fresh = []
            parent = handle
        if fresh:
            self.runs.add(parent, fresh)
        self._note_regularity()

    def _note_regularity(self) -> None:
        if self._odd or self._slower or self.runs.gone:
            self._states.irregular |= self._confirmed
        else:
            self._states.irregular &= ~self._confirmed

    def _drop_only_copy(self, handle: Handle, block: int) -> None:
        """The one copy of a block, on the GPU, is gone."""
        self._drop_handle(handle, block)
        self._states.drop(block, self._confirmed)

    def _drop_handle(self, handle: Handle, block: int) -> None:
        states, runs = self._states, self.runs
        del self._handles[handle]
        states.entries -= 1
        holes = len(runs.gone)
        runs.remove(handle, block)
        if holes or runs.gone:
            states.entries += len(runs.gone) - holes
            self._note_regularity()

    def _change(self, handle: Handle, block: int, unit: int) -> None:
        """One copy more or less of a known block."""
        before = self._copies.get(handle, 1)
        own = before + unit
        if own > 1:
            self._copies[handle] = own
        else:
            self._copies.pop(handle, None)
        slower = (own >> _FIELD > 0) - (before >> _FIELD > 0)
        if slower:
            self._slower += slower
            self._note_regularity()
        if not own:
            self._drop_handle(handle, block)
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
