"""A fixed number of nodes, by block hash; what was used least recently makes room.

All of its memory is taken when it is made, as numbers side by side: 65 bytes a node and one more for each set
of eight, whatever traffic comes. (A dictionary of objects would take more than three times that, would grow,
and the garbage collector would have to walk it.) A hash belongs to one set, and a new node takes the place of
the one of its set that was touched longest ago. Hashes spread evenly, so that is nearly always one of the
oldest of all.
"""

from array import array

WAYS = 8  # nodes in a set
NOWHERE = -1  # instead of a slot
_IDLE_S = 3600.0


class PrefixNodes:
    """Columns of numbers; a node is its slot, an index into each of them, until the next `put`.

    Attributes:
        first: when the node was first used, seconds.
        last: when it was last used, seconds.
        born: prompts of the group before its first use.
        uses: prompts that went through it.
        breadth: different ways in which they went on.
        continued: prompts that went on from where one had ended.
    """

    def __init__(self, max_nodes: int) -> None:
        self._ways = min(WAYS, max_nodes)
        self._sets = max_nodes // self._ways
        size = self._sets * self._ways
        nothing = bytes(8 * size)
        self._keys = array("Q", nothing)
        self._touched = array("Q", nothing)  # serial number of the last `put`; 0: no node here
        self._serial = 0
        self._ends = bytearray(self._sets)  # nodes of each set at which a prompt ended
        self.first = array("d", nothing)
        self.last = array("d", nothing)
        self.born = array("Q", nothing)
        self.uses = array("Q", nothing)
        self.breadth = array("Q", nothing)
        self.continued = array("Q", nothing)
        self._ended = bytearray(size)

    def __len__(self) -> int:
        return len(self._touched) - self._touched.count(0)

    def find(self, key: int, now: float) -> int:
        """The slot of a node, or `NOWHERE`: not known, or not used for an hour."""
        slot = self._slot(key)
        return NOWHERE if slot == NOWHERE or now - self.last[slot] > _IDLE_S else slot

    def find_end(self, key: int, now: float) -> int:
        """The slot of a node at which a prompt ended, or `NOWHERE`."""
        if not self._ends[key % self._sets]:
            return NOWHERE
        slot = self.find(key, now)
        return slot if slot != NOWHERE and self._ended[slot] else NOWHERE

    def put(self, key: int, now: float, born: int) -> int:
        """The slot of a node that is used now: the one there is, or a new one."""
        slot = self._slot(key)
        if slot == NOWHERE:
            slot = self._oldest(key)
            self._start(slot, now, born)
            self._keys[slot] = key
        elif now - self.last[slot] > _IDLE_S:
            self._start(slot, now, born)
        self._serial += 1
        self._touched[slot] = self._serial
        self.last[slot] = now
        self.uses[slot] += 1
        return slot

    def end(self, slot: int) -> None:
        """A prompt ended here."""
        if not self._ended[slot]:
            self._ended[slot] = 1
            self._ends[slot // self._ways] += 1

    def _slot(self, key: int) -> int:
        start = key % self._sets * self._ways
        keys = self._keys[start : start + self._ways]
        if key in keys:
            slot = start + keys.index(key)
            if self._touched[slot]:
                return slot
        return NOWHERE

    def _oldest(self, key: int) -> int:
        start = key % self._sets * self._ways
        touched = self._touched[start : start + self._ways]
        return start + touched.index(min(touched))

    def _start(self, slot: int, now: float, born: int) -> None:
        if self._ended[slot]:
            self._ended[slot] = 0
            self._ends[slot // self._ways] -= 1
        self.first[slot] = self.last[slot] = now
        self.born[slot] = born
        self.uses[slot] = self.breadth[slot] = self.continued[slot] = 0
