"""A fixed number of nodes, by block hash; what was used least recently makes room.

Nodes are numbers side by side, taken when it is made; a map from hashes to slots, which has no more entries
than there are nodes, finds them, and another those at which prompts ended: some 320 bytes a node at most.
(The garbage collector need not walk numbers.) A hash belongs to one set of eight, and a new node takes the
place of the one of its set that was touched longest ago. Hashes spread evenly, so that is nearly always one
of the oldest of all.
"""

from array import array
from collections.abc import Sequence

WAYS = 8  # nodes in a set
NOWHERE = -1  # instead of a slot
_IDLE_S = 3600.0
_WIDTH = 8  # numbers per node, of which one is not used


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
        # Each column is every eighth of these numbers, so that all of a node is in one place: most of what
        # using one costs is waiting for memory.
        memory = memoryview(bytearray(8 * _WIDTH * size))
        numbers, times = memory.cast("Q"), memory.cast("d")
        self._touched = array("Q", bytes(8 * size))  # serial number of the last `put`; 0: no node here
        self._serial = 0
        self._slots: dict[int, int] = {}
        self._ends: dict[int, int] = {}  # those of `_slots` at which a prompt ended
        self._keys = numbers[0::_WIDTH]
        self.first = times[1::_WIDTH]
        self.last = times[2::_WIDTH]
        self.born = numbers[3::_WIDTH]
        self.uses = numbers[4::_WIDTH]
        self.breadth = numbers[5::_WIDTH]
        self.continued = numbers[6::_WIDTH]

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, key: int, now: float) -> int:
        """The slot of a node, or `NOWHERE`: not known, or not used for an hour."""
        slot = self._slots.get(key, NOWHERE)
        return NOWHERE if slot == NOWHERE or now - self.last[slot] > _IDLE_S else slot

    def known(self, keys: Sequence[int], now: float) -> list[int]:
        """The slots of the first of these nodes, up to one that `find` would not find."""
        known: list[int] = []
        slots, last = self._slots, self.last
        for key in keys:
            slot = slots.get(key, NOWHERE)
            if slot == NOWHERE or now - last[slot] > _IDLE_S:
                break
            known.append(slot)
        return known

    def last_end(self, keys: Sequence[int], now: float) -> int:
        """The slot of the last one of `keys` at which a prompt ended, or `NOWHERE`."""
        ends = self._ends
        if not ends.keys().isdisjoint(keys):
            for key in reversed(keys):
                if key in ends and now - self.last[ends[key]] <= _IDLE_S:
                    return ends[key]
        return NOWHERE

    def put(self, key: int, now: float, born: int) -> int:
        """The slot of a node that is used now: the one there is, or a new one."""
        self._use((key,), now, born)
        return self._slots[key]

    def pass_through(self, keys: Sequence[int], now: float, born: int) -> None:
        """A prompt goes through these nodes, and ends at the last of them.

        Each is used now, and where one that there was goes on to one that there was not, its breadth grows.
        They are put from the deepest up, so that the shallower are the more recently used.
        """
        self._use(tuple(reversed(keys)), now, born)
        end = self._slots.get(keys[-1], NOWHERE) if keys else NOWHERE
        if end != NOWHERE:
            self.end(end)

    def _use(self, keys: Sequence[int], now: float, born: int) -> None:
        # One loop without calls: forty nodes or so for every prompt.
        slots, touched, last, uses, breadth = self._slots, self._touched, self.last, self.uses, self.breadth
        sets, ways, serial = self._sets, self._ways, self._serial
        parted = 0  # 1: the prompt goes on from here in a way that none did before
        for key in keys:
            serial += 1
            slot = slots.get(key, NOWHERE)
            if slot == NOWHERE:
                start = key % sets * ways
                ages = touched[start : start + ways]
                age = min(ages)
                slot = start + ages.index(age)
                if age:
                    self._drop(slot)
                self._keys[slot] = key
                slots[key] = slot
            elif now - last[slot] <= _IDLE_S:
                touched[slot] = serial
                last[slot] = now
                uses[slot] += 1
                if parted:
                    breadth[slot] += 1
                    parted = 0
                continue
            else:
                self._ends.pop(key, None)
            touched[slot] = serial
            self.first[slot] = last[slot] = now
            self.born[slot] = born
            uses[slot] = 1
            breadth[slot] = parted
            self.continued[slot] = 0
            parted = 1
        self._serial = serial

    def end(self, slot: int) -> None:
        """A prompt ended here."""
        self._ends[self._keys[slot]] = slot

    def _drop(self, slot: int) -> None:
        key = self._keys[slot]
        del self._slots[key]
        self._ends.pop(key, None)
