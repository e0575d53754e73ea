"""How many KV blocks engines evict, and how long those had been there.

Ages are those of a sample, one handle in `SAMPLE` chosen by its hash, so that memory stays a small part of
the index's. A block's age counts from the last event that told of its being stored, or from the replay that
brought it. A cleared cache is no eviction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier, WorkerId

SAMPLE = 16


class Evictions(NamedTuple):
    """What some events told. `ages_s` are seconds, of the sampled blocks among the `blocks` evicted."""

    blocks: int
    ages_s: tuple[float, ...]


@dataclass(slots=True)
class _Worker:
    group: int | None = None  # of layers: all store the same handles, one counts
    stored_at: dict[int | bytes, float] = field(default_factory=dict)


class BlockLifetimes:
    """Sampled blocks of all workers, in the GPU tier."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Worker] = {}

    def __len__(self) -> int:
        return sum(len(worker.stored_at) for worker in self._workers.values())

    def apply(self, worker: WorkerId, events: Sequence[KvEvent], now: float) -> Evictions:
        """Take in events of `worker`; what they evicted."""
        record = self._workers.setdefault(worker, _Worker())
        blocks = 0
        ages: list[float] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                record.stored_at.clear()
            elif event.tier is not Tier.GPU:
                continue
            elif isinstance(event, BlockStored):
                if record.group is None:
                    record.group = event.group
                if event.group == record.group:
                    for handle in event.block_hashes:
                        if hash(handle) % SAMPLE == 0:
                            record.stored_at[handle] = now
            elif record.group in (None, event.group):
                blocks += len(event.block_hashes)
                ages += _ages(record, event, now)
        return Evictions(blocks, tuple(ages))

    def forget(self, worker: WorkerId) -> None:
        """The worker has left, or is another engine now."""
        self._workers.pop(worker, None)


def _ages(record: _Worker, event: BlockRemoved, now: float) -> list[float]:
    stored = (
        record.stored_at.pop(handle, None) for handle in event.block_hashes if hash(handle) % SAMPLE == 0
    )
    return [now - at for at in stored if at is not None]
