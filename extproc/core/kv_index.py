"""Which worker holds which prefix: confirmed by KV events, or reserved by prompts on their way.

Theory of operation. Three questions are asked of a prompt's block hashes, each for all workers at once:

1. What was sent where? Prompts on their way are a radix tree (see `kv_reservations`): a step per stretch.
2. What do regular engines hold? Each block has one integer with bits of every worker (see `kv_states`).
   A regular engine holds no block without those before it, so where two blocks have the same holders all
   between them do: halving finds the few places where holders drop out.
3. What do the others hold, those with holes or with copies in slower tiers? A walk block by block, in which
   a worker stays in the race while its bits say that it has the block.

Memory has a ceiling: above it, the claim about the oldest leaf is given up, never one about a middle block.

Events and requests meet on the chained hash of `hashing`, seeded by `namespace`. A match is a claim about the
past, never a proof: eviction may be on its way.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from extproc.core.kv_chain import EventHashes, event_chain
from extproc.core.kv_match import Group, Race, crossed, halve, spread
from extproc.core.kv_reservations import NEVER, Holdings, Reservations
from extproc.core.kv_residence import EngineBlocks
from extproc.core.kv_states import CONFIRMED, WIDTH, BlockStates
from extproc.core.kv_transfer import EnginePart, export, restore
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, WorkerId

_MAX_GROUPS = 1024


class Match(NamedTuple):
    """What one worker has of a prompt, in blocks.

    Attributes:
        worker: who.
        blocks: length of the prefix that is on the GPU or will be, thanks to prompts sent there before.
        reserved_only: those of `blocks` that no event has confirmed yet.
        offloaded: how many blocks go on from there without a hole when slower tiers count too.
        sent: leading blocks that were sent there, whatever events say.
    """

    worker: WorkerId
    blocks: int
    reserved_only: int
    offloaded: int
    sent: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Size and health of the index, of one worker or in total.

    Attributes:
        blocks: engine blocks held, in any tier.
        gpu_copies: physical copies on the GPU; more than `blocks` means duplicates.
        slower_copies: physical copies in slower tiers.
        reservations: blocks reserved and not released, each as often as it was reserved.
        orphans: blocks kept aside because their parent is not known.
        orphans_dropped: orphans given up because there were too many.
        unknown_removes: removals of blocks that were not held: events before them are missing.
        unknown_offloads: offload events without tokens about blocks that are not held.
        ignored_groups: events of layer groups that do not decide.
        malformed: stored events whose tokens do not fit their blocks.
        evicted: blocks given up because of the ceiling, though their engine holds them.
        unknown_worker_events: events of workers that were not added (total only).
    """

    blocks: int = 0
    gpu_copies: int = 0
    slower_copies: int = 0
    reservations: int = 0
    orphans: int = 0
    orphans_dropped: int = 0
    unknown_removes: int = 0
    unknown_offloads: int = 0
    ignored_groups: int = 0
    malformed: int = 0
    evicted: int = 0
    unknown_worker_events: int = 0


class IndexFaults(NamedTuple):
    """Signs that one worker's events are incomplete or unlike ours; see `IndexStats` for each."""

    orphans: int = 0
    orphans_dropped: int = 0
    unknown_removes: int = 0
    unknown_offloads: int = 0
    malformed: int = 0


class _Worker:
    __slots__ = ("engine", "slot", "worker")

    def __init__(self, worker: WorkerId, slot: int, engine: EngineBlocks) -> None:
        self.worker = worker
        self.slot = slot
        self.engine = engine


class KvIndex:
    """The blocks of all workers.

    Args:
        max_orphans: how many blocks with unknown parent to keep per worker.
        event_hashes: tells the hashes of stored blocks.
        max_blocks: ceiling of the blocks kept, each counted for every worker that holds it; 0: none.

    Attributes:
        sent: prompts on their way, and what workers without events are assumed to hold.
        max_blocks: the ceiling.
        given_up: blocks so far that were forgotten because of it, though they are held.
    """

    def __init__(
        self, *, max_orphans: int = 8192, event_hashes: EventHashes = event_chain, max_blocks: int = 0
    ) -> None:
        self._max_orphans = max_orphans
        self.max_blocks = max_blocks
        self.given_up = 0
        self._event_hashes = event_hashes
        self._states = BlockStates()
        self.sent = Reservations()
        self._workers: dict[WorkerId, _Worker] = {}
        self._slots: list[_Worker | None] = []
        self._everyone = 0  # lowest bit of every slot
        self._groups: dict[int, tuple[tuple[int, WorkerId], ...]] = {}  # seen lately, see `_members`
        self._unknown_worker_events = 0

    def add_worker(self, worker: WorkerId, model_revision: str, tokenizer_revision: str) -> None:
        """Start to track a worker, empty.

        Raises:
            ValueError: it is tracked already.
        """
        if worker in self._workers:
            raise ValueError(f"worker {worker} is in the index already: remove it first")
        slot = next((at for at, taken in enumerate(self._slots) if taken is None), len(self._slots))
        if slot == len(self._slots):
            self._slots.append(None)
            self._everyone |= CONFIRMED << WIDTH * slot
        engine = EngineBlocks(
            self._states, slot, model_revision, tokenizer_revision, self._max_orphans, self._event_hashes
        )
        self._groups.clear()
        self._slots[slot] = self._workers[worker] = _Worker(worker, slot, engine)

    def remove_worker(self, worker: WorkerId) -> None:
        """Forget a worker with all it holds, its reservations too. Unknown workers are ignored."""
        entry = self._workers.pop(worker, None)
        if entry is None:
            return
        entry.engine.clear()
        self.sent.clear(entry.slot)
        self._slots[entry.slot] = None
        self._groups.clear()

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def apply(self, worker: WorkerId, event: KvEvent) -> None:
        """One event of `worker`; counted and ignored if the worker is not tracked."""
        entry = self._workers.get(worker)
        if entry is None:
            self._unknown_worker_events += 1
            return
        engine = entry.engine
        match event:
            case BlockStored():
                engine.store(event)
            case BlockRemoved():
                engine.remove(event)
            case AllBlocksCleared():
                engine.clear()
        if self.max_blocks:
            self._keep_below_the_ceiling()

    def _keep_below_the_ceiling(self) -> None:
        """Give up the oldest leaves, if there is more than there may be."""
        surplus = self.surplus
        while surplus > 0 and (run := self._states.ages.oldest()) is not None:
            surplus -= run.owner.evict(run)
            self.given_up += 1

    def clear(self, worker: WorkerId) -> None:
        """Drop what events have confirmed (the engine restarted); reservations stay."""
        entry = self._workers.get(worker)
        if entry is not None:
            entry.engine.clear()

    def confirmed(self, worker: WorkerId) -> Iterator[int]:
        """Blocks that events say the worker holds, in any tier; the oldest first."""
        entry = self._workers.get(worker)
        return iter(()) if entry is None else entry.engine.confirmed()

    def held(self, worker: WorkerId, handles: Iterable[int | bytes]) -> dict[int | bytes, int]:
        """The blocks an engine means by these handles, of those it holds."""
        entry = self._workers.get(worker)
        return {} if entry is None else entry.engine.held(handles)

    def forget(self, worker: WorkerId, handle: int | bytes) -> None:
        """Drop every copy of what the engine means by `handle`: they are gone, and no event told of it."""
        entry = self._workers.get(worker)
        if entry is not None:
            entry.engine.forget(handle)

    def export(self, worker: WorkerId, part_blocks: int = 32_768) -> list[EnginePart]:
        """What events have said of `worker`, all as it is now, in parts of at most so many blocks.

        Raises:
            ValueError: the worker is not tracked.
        """
        return export(self._entry(worker).engine, part_blocks)

    def restore(self, worker: WorkerId, part: EnginePart) -> None:
        """Take what another index has exported; all parts in order, before any event.

        Raises:
            ValueError: the worker is not tracked, or the part is damaged; then nothing of it is taken.
        """
        restore(self._entry(worker).engine, part)
        self._keep_below_the_ceiling()

    def reserve(self, worker: WorkerId, chain: Sequence[int]) -> None:
        """Count a prompt as present that has been sent to `worker`: its blocks from the first on.

        Raises:
            ValueError: the worker is not tracked.
        """
        self.sent.reserve(self._entry(worker).slot, chain)

    def unreserve(self, worker: WorkerId, chain: Sequence[int], now: float = NEVER) -> None:
        """Take back one `reserve` of the same chain; `now`: when it was last used.

        Raises:
            ValueError: the worker is not tracked, or the chain is not reserved; nothing is changed.
        """
        if not self.sent.unreserve(self._entry(worker).slot, chain, now):
            raise ValueError(f"a chain is not reserved on {worker}: each reservation ends once")

    def slot(self, worker: WorkerId) -> int | None:
        """The number of a tracked worker; None for others."""
        entry = self._workers.get(worker)
        return None if entry is None else entry.slot

    @property
    def surplus(self) -> int:
        """Blocks kept above the ceiling."""
        most = self.max_blocks
        return max(0, self._states.entries + self.sent.blocks - most) if most else 0

    def match(self, chain: Sequence[int]) -> list[Match]:
        """What every worker has of a prompt; workers that have nothing of it are left out.

        Order: by slot, which is the order in which workers were added, gaps filled first.
        """
        if not chain:
            return []
        states = self._states
        sent = self.sent.prefixes(chain)
        first = states.of.get(chain[0], 0)
        irregular = 0
        if states.irregular:
            irregular = states.irregular & (first | first >> 1 | sum(bits for bits, _ in sent))
        regular = first & self._everyone & ~states.irregular
        placed: list[tuple[int, Match]] = []
        new = tuple.__new__
        for bits, claimed, ours in crossed(halve(states.of, chain, regular) if regular else (), sent):
            blocks, waiting = (claimed, 0) if claimed >= ours else (ours, ours - claimed)
            members = self._members(bits & ~irregular if irregular else bits)
            # The tuple's own constructor: this is all that a match costs per worker.
            placed += [(slot, new(Match, (worker, blocks, waiting, 0, ours))) for slot, worker in members]
        if irregular:
            placed += self._raced(chain, irregular, sent)
        placed.sort()
        return [match for _, match in placed]

    def _raced(self, chain: Sequence[int], racing: int, sent: Sequence[Group]) -> Iterator[tuple[int, Match]]:
        """Matches of workers that have holes, or copies in slower tiers."""
        ours: dict[int, int] = {}
        for bits, length in sent:
            spread(ours, bits & racing, length)
        race = Race(self._states.of, chain, racing, ours)
        for slot, worker in self._members(racing):
            bit = CONFIRMED << WIDTH * slot
            blocks, total = race.blocks[bit], race.total[bit]
            if total:
                waiting = race.waiting.get(bit, 0)
                yield slot, Match(worker, blocks, waiting, total - blocks, ours.get(bit, 0))

    def _members(self, bits: int) -> tuple[tuple[int, WorkerId], ...]:
        """The workers that bits stand for, with their slots, in order."""
        known = self._groups.get(bits)
        if known is None:
            found: list[tuple[int, WorkerId]] = []
            left = bits
            while left:
                bit = left & -left
                slot = bit.bit_length() // WIDTH
                entry = self._slots[slot]
                if entry is not None:
                    found.append((slot, entry.worker))
                left ^= bit
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            known = self._groups[bits] = tuple(found)
        return known

    def memory_bytes(self) -> int:
        """Estimated memory of all maps and of the numbers in them, at no cost per block."""
        parts = [self._states.memory_bytes, *(entry.engine.memory_bytes for entry in self._workers.values())]
        return sum(parts) + self.sent.memory_bytes

    def block_size(self, worker: WorkerId) -> int | None:
        """Tokens per block as the worker's events tell; None before the first."""
        entry = self._workers.get(worker)
        return None if entry is None else entry.engine.block_size

    def usage(self, worker: WorkerId) -> tuple[int | None, int, int]:
        """`block_size`, `resident_blocks` and `reserved_blocks` in one look."""
        entry = self._workers.get(worker)
        if entry is None:
            return None, 0, 0
        return entry.engine.block_size, entry.engine.blocks, self.sent.of(entry.slot).in_use

    def resident_blocks(self, worker: WorkerId) -> int:
        """Blocks that events say the worker holds, in any tier; 0 for an unknown worker."""
        entry = self._workers.get(worker)
        return 0 if entry is None else entry.engine.blocks

    @property
    def distinct_blocks(self) -> int:
        """Blocks that events say any worker holds, each counted once."""
        return len(self._states.of)

    @property
    def entries(self) -> int:
        """What memory grows with, and `max_blocks` bounds."""
        return self._states.entries + self.sent.blocks

    def faults(self, worker: WorkerId) -> IndexFaults:
        """What is wrong with a worker's events, at no cost; nothing for an unknown worker."""
        entry = self._workers.get(worker)
        if entry is None:
            return IndexFaults()
        engine = entry.engine
        return IndexFaults(
            engine.orphans.blocks,
            engine.orphans.dropped,
            engine.unknown_removes,
            engine.unknown_offloads,
            engine.malformed,
        )

    def reserved_blocks(self, worker: WorkerId) -> int:
        """Different blocks that open requests at the worker use; 0 for an unknown worker."""
        entry = self._workers.get(worker)
        return 0 if entry is None else self.sent.of(entry.slot).in_use

    def stats(self, worker: WorkerId | None = None) -> IndexStats:
        """Size and health of one worker's part (zero if it is not tracked), or of the whole index."""
        if worker is not None:
            entry = self._workers.get(worker)
            return IndexStats() if entry is None else _stats(entry, self.sent.of(entry.slot))
        parts = [_stats(entry, self.sent.of(entry.slot)) for entry in self._workers.values()]
        return IndexStats(
            blocks=sum(part.blocks for part in parts),
            gpu_copies=sum(part.gpu_copies for part in parts),
            slower_copies=sum(part.slower_copies for part in parts),
            reservations=sum(part.reservations for part in parts),
            orphans=sum(part.orphans for part in parts),
            orphans_dropped=sum(part.orphans_dropped for part in parts),
            unknown_removes=sum(part.unknown_removes for part in parts),
            unknown_offloads=sum(part.unknown_offloads for part in parts),
            ignored_groups=sum(part.ignored_groups for part in parts),
            malformed=sum(part.malformed for part in parts),
            evicted=sum(part.evicted for part in parts),
            unknown_worker_events=self._unknown_worker_events,
        )

    def _entry(self, worker: WorkerId) -> _Worker:
        entry = self._workers.get(worker)
        if entry is None:
            raise ValueError(f"worker {worker} is not in the index: reservations need an added worker")
        return entry


def _stats(entry: _Worker, sent: Holdings) -> IndexStats:
    engine = entry.engine
    gpu_copies, slower_copies = engine.copies
    return IndexStats(
        blocks=engine.blocks,
        gpu_copies=gpu_copies,
        slower_copies=slower_copies,
        reservations=sent.reserved + sent.assumed,
        orphans=engine.orphans.blocks,
        orphans_dropped=engine.orphans.dropped,
        unknown_removes=engine.unknown_removes,
        unknown_offloads=engine.unknown_offloads,
        ignored_groups=engine.ignored_groups,
        malformed=engine.malformed,
        evicted=engine.evicted,
    )
