"""Which worker holds which prefix: confirmed by KV events, or reserved by prompts on their way.

One walk along a prompt's block hashes answers for all workers at once: each block has one integer with three
bits per worker (see `kv_residence`), and a worker stays in the race while its bits say that it has the block.
Neighbouring blocks mostly have the same holders, so the walk compares whole runs and does work only where the
set of holders changes; it stops where the last holder drops out.

Events and requests meet on the chained hash of `hashing`, seeded by `namespace`. A match is a claim about the
past, never a proof: eviction may be on its way.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from extproc.core.kv_chain import EventHashes, event_chain
from extproc.core.kv_residence import CONFIRMED, RESERVED, BlockStates, EngineBlocks, map_bytes
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, WorkerId

_CHUNK = 64  # blocks looked up and compared in one go
_NOTHING: Mapping[int, int] = {}


class Match(NamedTuple):
    """What one worker has of a prompt, in blocks.

    Attributes:
        worker: who.
        blocks: length of the prefix that is on the GPU or will be, thanks to prompts sent there before.
        reserved_only: those of `blocks` that no event has confirmed yet.
        offloaded: how many blocks go on from there without a hole when slower tiers count too.
    """

    worker: WorkerId
    blocks: int
    reserved_only: int
    offloaded: int


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
    unknown_worker_events: int = 0


class IndexFaults(NamedTuple):
    """Signs that one worker's events are incomplete or unlike ours; see `IndexStats` for each."""

    orphans: int = 0
    orphans_dropped: int = 0
    unknown_removes: int = 0
    unknown_offloads: int = 0
    malformed: int = 0


class _Worker:
    __slots__ = ("engine", "reserved", "slot", "worker")

    def __init__(self, worker: WorkerId, slot: int, engine: EngineBlocks) -> None:
        self.worker = worker
        self.slot = slot
        self.engine = engine
        self.reserved: dict[int, int] = {}


class KvIndex:
    """The blocks of all workers.

    Args:
        max_orphans: how many blocks with unknown parent to keep per worker.
        event_hashes: tells the hashes of stored blocks.
    """

    def __init__(self, *, max_orphans: int = 8192, event_hashes: EventHashes = event_chain) -> None:
        self._max_orphans = max_orphans
        self._event_hashes = event_hashes
        self._states = BlockStates()
        self._workers: dict[WorkerId, _Worker] = {}
        self._slots: list[_Worker | None] = []
        self._everyone = 0  # lowest bit of every slot
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
            self._everyone |= CONFIRMED << 3 * slot
        engine = EngineBlocks(
            self._states, slot, model_revision, tokenizer_revision, self._max_orphans, self._event_hashes
        )
        self._slots[slot] = self._workers[worker] = _Worker(worker, slot, engine)

    def remove_worker(self, worker: WorkerId) -> None:
        """Forget a worker with all it holds, its reservations too. Unknown workers are ignored."""
        entry = self._workers.pop(worker, None)
        if entry is None:
            return
        entry.engine.clear()
        for block in entry.reserved:
            self._states.drop(block, RESERVED << 3 * entry.slot)
        self._slots[entry.slot] = None

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._workers

    def apply(self, worker: WorkerId, event: KvEvent) -> None:
        """One event of `worker`; counted and ignored if the worker is not tracked."""
        entry = self._workers.get(worker)
        if entry is None:
            self._unknown_worker_events += 1
            return
        match event:
            case BlockStored():
                entry.engine.store(event)
            case BlockRemoved():
                entry.engine.remove(event)
            case AllBlocksCleared():
                entry.engine.clear()

    def clear(self, worker: WorkerId) -> None:
        """Drop what events have confirmed (the engine restarted); reservations stay."""
        entry = self._workers.get(worker)
        if entry is not None:
            entry.engine.clear()

    def confirmed(self, worker: WorkerId) -> Iterator[int]:
        """Blocks that events say the worker holds, in any tier; the oldest first."""
        entry = self._workers.get(worker)
        return iter(()) if entry is None else entry.engine.confirmed()

    def block_of(self, worker: WorkerId, handle: int | bytes) -> int | None:
        """The block an engine means by `handle`, if it holds it."""
        entry = self._workers.get(worker)
        return None if entry is None else entry.engine.block_of(handle)

    def forget(self, worker: WorkerId, handle: int | bytes) -> None:
        """Drop every copy of what the engine means by `handle`: they are gone, and no event told of it."""
        entry = self._workers.get(worker)
        if entry is not None:
            entry.engine.forget(handle)

    def reserved(self, worker: WorkerId) -> Mapping[int, int]:
        """Blocks reserved on the worker, with how often; a view."""
        entry = self._workers.get(worker)
        return _NOTHING if entry is None else entry.reserved

    def reserve(self, worker: WorkerId, hashes: Sequence[int]) -> None:
        """Count blocks as present: a prompt with these blocks has been sent to `worker`.

        Raises:
            ValueError: the worker is not tracked.
        """
        entry = self._entry(worker)
        reserved, bit, states = entry.reserved, RESERVED << 3 * entry.slot, self._states
        for block in hashes:
            count = reserved.get(block, 0)
            reserved[block] = count + 1
            if not count:
                states.add(block, bit)

    def unreserve(self, worker: WorkerId, hashes: Sequence[int]) -> None:
        """Take back one `reserve` of the same hashes.

        Raises:
            ValueError: the worker is not tracked, or a block is not reserved that often; nothing is changed.
        """
        entry = self._entry(worker)
        reserved, bit, states = entry.reserved, RESERVED << 3 * entry.slot, self._states
        for done, block in enumerate(hashes):
            count = reserved.get(block, 0)
            if count > 1:
                reserved[block] = count - 1
            elif count:
                del reserved[block]
                states.drop(block, bit)
            else:
                self.reserve(worker, hashes[:done])
                raise ValueError(f"block {block:#x} is not reserved on {worker}: each reservation ends once")

    def match(self, hashes: Sequence[int]) -> list[Match]:
        """What every worker has of a prompt; workers that have nothing of it are left out.

        Order: by slot, which is the order in which workers were added, gaps filled first.
        """
        gpu = held = self._everyone  # who still has everything: on the GPU; in any tier
        blocks: dict[int, int] = {}  # lowest bit of a slot -> length
        total: dict[int, int] = {}
        waiting: dict[int, int] = {}
        for state, start, stop in self._runs(hashes):
            present = (state | state >> 1) & gpu
            if present != gpu:
                _set(blocks, gpu ^ present, start)
                gpu = present
            kept = (state | state >> 1 | state >> 2) & held
            if kept != held:
                _set(total, held ^ kept, start)
                held = kept
                if not held:
                    break
            unconfirmed = state >> 1 & ~state & gpu
            if unconfirmed:
                _add(waiting, unconfirmed, stop - start)
        _set(blocks, gpu, len(hashes))
        _set(total, held, len(hashes))
        matches = []
        for entry in self._slots:
            if entry is not None:
                bit = CONFIRMED << 3 * entry.slot
                length = total[bit]
                if length:
                    on_gpu = blocks[bit]
                    matches.append(Match(entry.worker, on_gpu, waiting.get(bit, 0), length - on_gpu))
        return matches

    def _runs(self, hashes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Stretches of blocks with one state, as (state, start, stop), up to the first block nobody has."""
        look = self._states.of.get
        state = -1
        start = at = 0
        for first in range(0, len(hashes), _CHUNK):
            chunk = list(map(look, hashes[first : first + _CHUNK]))
            if chunk.count(state) == len(chunk):
                at += len(chunk)
                continue
            for new in chunk:
                if new != state:
                    if at:
                        yield state, start, at
                    if new is None:
                        yield 0, at, at
                        return
                    state, start = new, at
                at += 1
        if at:
            yield state, start, at

    def memory_bytes(self) -> int:
        """Estimated memory of all maps and of the numbers in them, at no cost per block."""
        parts = [self._states.memory_bytes, *(entry.engine.memory_bytes for entry in self._workers.values())]
        return sum(parts) + sum(map(map_bytes, (entry.reserved for entry in self._workers.values())))

    def block_size(self, worker: WorkerId) -> int | None:
        """Tokens per block as the worker's events tell; None before the first."""
        entry = self._workers.get(worker)
        return None if entry is None else entry.engine.block_size

    def resident_blocks(self, worker: WorkerId) -> int:
        """Blocks that events say the worker holds, in any tier; 0 for an unknown worker."""
        entry = self._workers.get(worker)
        return 0 if entry is None else entry.engine.blocks

    @property
    def distinct_blocks(self) -> int:
        """Blocks that any worker holds or is about to, each counted once."""
        return len(self._states.of)

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
        return 0 if entry is None else len(entry.reserved)

    def stats(self, worker: WorkerId | None = None) -> IndexStats:
        """Size and health of one worker's part (zero if it is not tracked), or of the whole index."""
        if worker is not None:
            entry = self._workers.get(worker)
            return IndexStats() if entry is None else _stats(entry)
        parts = [_stats(entry) for entry in self._workers.values()]
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
            unknown_worker_events=self._unknown_worker_events,
        )

    def _entry(self, worker: WorkerId) -> _Worker:
        entry = self._workers.get(worker)
        if entry is None:
            raise ValueError(f"worker {worker} is not in the index: reservations need an added worker")
        return entry


def _set(lengths: dict[int, int], bits: int, length: int) -> None:
    while bits:
        bit = bits & -bits
        lengths[bit] = length
        bits ^= bit


def _add(counts: dict[int, int], bits: int, length: int) -> None:
    while bits:
        bit = bits & -bits
        counts[bit] = counts.get(bit, 0) + length
        bits ^= bit


def _stats(entry: _Worker) -> IndexStats:
    engine = entry.engine
    gpu_copies, slower_copies = engine.copies
    return IndexStats(
        blocks=engine.blocks,
        gpu_copies=gpu_copies,
        slower_copies=slower_copies,
        reservations=sum(entry.reserved.values()),
        orphans=engine.orphans.blocks,
        orphans_dropped=engine.orphans.dropped,
        unknown_removes=engine.unknown_removes,
        unknown_offloads=engine.unknown_offloads,
        ignored_groups=engine.ignored_groups,
        malformed=engine.malformed,
    )
