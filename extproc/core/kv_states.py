"""For every block its state on every worker, as one integer.

A worker has a slot, and `WIDTH` bits of each state from bit `WIDTH` times that on: `CONFIRMED` while events
say that it has a copy on the GPU, `OFFLOADED` while it has one in a slower tier.
"""

import sys
from collections.abc import Sequence
from itertools import repeat

from extproc.core.kv_runs import Ages, Handle

WIDTH = 2
CONFIRMED, OFFLOADED = 1, 2

_INTERNED_MAX = 65_536
_NUMBER_BYTES = 36  # of a Python integer of 64 bits


def map_bytes(of: "dict[int, int] | dict[Handle, int]") -> int:
    """Estimated memory of a map: its table, and 36 bytes for each key, which is a number of 64 bits."""
    return sys.getsizeof(of) + _NUMBER_BYTES * len(of)


class BlockStates:
    """For every block, the state on every worker (see above for its bits).

    Equal states share one integer object: a map of a million blocks holds a handful of them, and comparing
    two neighbours is comparing two pointers.

    Attributes:
        of: the state of each block.
        irregular: lowest bit of every worker whose engine is not regular.
        ages: which of all blocks would be missed the least.
        entries: what memory grows with: blocks that engines hold, each as often as one does, and holes.
    """

    __slots__ = ("_interned", "ages", "entries", "irregular", "of")

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self.irregular = 0
        self.ages = Ages()
        self.entries = 0
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

    def put(self, blocks: Sequence[int], state: int) -> None:
        """`state` of all `blocks`."""
        self.of.update(zip(blocks, repeat(self._interned.setdefault(state, state))))
        if len(self._interned) > _INTERNED_MAX:
            self._interned.clear()

    def drop(self, block: int, bits: int) -> None:
        """Clear `bits` of `block`; a block nobody has is forgotten."""
        state = self.of.get(block, 0) & ~bits
        if state:
            self.of[block] = self._interned.setdefault(state, state)
        else:
            self.of.pop(block, None)
