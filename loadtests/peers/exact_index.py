"""What every worker's cache holds, by its KV events: one reference per copy, as engines announce them."""

from collections import Counter
from collections.abc import Sequence

from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class ExactIndex:
    """Blocks by worker. A gap in the events is not noticed: what was known stays."""

    def __init__(self, replicas: int) -> None:
        self._copies: list[Counter[int | bytes]] = [Counter() for _ in range(replicas)]

    def apply(self, worker: int, events: Sequence[KvEvent]) -> None:
        """A batch of `worker`'s events."""
        copies = self._copies[worker]
        for event in events:
            match event:
                case BlockStored():
                    copies.update(event.block_hashes)
                case BlockRemoved():
                    for block in event.block_hashes:
                        if copies[block] <= 1:
                            del copies[block]
                        else:
                            copies[block] -= 1
                case AllBlocksCleared():
                    copies.clear()

    def size(self, worker: int) -> int:
        """Different blocks `worker` holds."""
        return len(self._copies[worker])

    def overlap(self, worker: int, prefix: Sequence[int]) -> int:
        """Leading blocks of `prefix` that `worker` holds.

        A block can only be dropped after those that follow it, in an engine; but not in a lossy view of it,
        so every one is looked up.
        """
        copies = self._copies[worker]
        for index, block in enumerate(prefix):
            if block not in copies:
                return index
        return len(prefix)
