"""How many leading blocks of a prompt workers hold, for all of them at once.

States are integers with bits of every worker (see `extproc.core.kv_states`); a worker is named by the lowest
of its bits here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

_CHUNK = 64  # blocks looked up and compared in one go

States = Mapping[int, int]

Group = tuple[int, int]
"""Workers, as bits, and the length that is theirs. No worker is in two groups of a list."""


def spread(lengths: dict[int, int], bits: int, length: int) -> None:
    """`length` for every worker of `bits`."""
    while bits:
        bit = bits & -bits
        lengths[bit] = length
        bits ^= bit


def halve(states: States, chain: Sequence[int], holders: int) -> list[Group]:
    """Lengths for workers that hold no block without all those before it.

    Args:
        states: of the blocks.
        chain: the prompt's blocks, at least one.
        holders: those of the workers that hold the first one; the others are not looked at.
    """
    look = states.get
    end = len(chain) - 1
    last = look(chain[end], 0) & holders
    groups = [(last, end + 1)] if last else []
    # Stretches whose first block has other holders than its last.
    stack = [(0, holders, end, last)] if last != holders else []
    while stack:
        low, here, high, there = stack.pop()
        if high - low == 1:
            groups.append((here ^ there, high))
            continue
        middle = (low + high) >> 1
        state = look(chain[middle], 0) & here
        if state != here:
            stack.append((low, here, middle, state))
        if state != there:
            stack.append((middle, state, high, there))
    return groups


def crossed(one: Iterable[Group], other: Sequence[Group]) -> Iterator[tuple[int, int, int]]:
    """Workers by both lengths, as (bits, length in `one`, length in `other`); 0: in none of its groups."""
    left = [bits for bits, _ in other]
    for bits, length in one:
        alone = bits
        for at, (others, their_length) in enumerate(other):
            both = bits & others
            if both:
                yield both, length, their_length
                alone ^= both
                left[at] ^= both
        if alone:
            yield alone, length, 0
    for rest, (_, their_length) in zip(left, other, strict=True):
        if rest:
            yield rest, 0, their_length


class Race:
    """Lengths for any workers, walking block by block.

    Attributes:
        blocks: on the GPU or sent there, by worker.
        total: in any tier.
        waiting: of `blocks`, those that no event has confirmed.
    """

    __slots__ = ("blocks", "total", "waiting")

    def __init__(self, states: States, chain: Sequence[int], racing: int, sent: Mapping[int, int]) -> None:
        """Run it.

        Args:
            states: of the blocks.
            chain: the prompt's blocks.
            racing: the workers.
            sent: leading blocks that were sent to workers, whatever their state says.
        """
        self.blocks: dict[int, int] = {}
        self.total: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        ours = {bit: length for bit, length in sent.items() if bit & racing}
        gpu = held = racing  # who still has everything
        for start, stop, state in _pieces(states, chain, ours.values()):
            on_its_way = sum(bit for bit, length in ours.items() if length > start)
            present = (state | on_its_way) & gpu
            if present != gpu:
                spread(self.blocks, gpu ^ present, start)
                gpu = present
            kept = (state | on_its_way | state >> 1) & held
            if kept != held:
                spread(self.total, held ^ kept, start)
                held = kept
                if not held:
                    break
            unconfirmed = on_its_way & ~state & gpu
            while unconfirmed:
                bit = unconfirmed & -unconfirmed
                self.waiting[bit] = self.waiting.get(bit, 0) + stop - start
                unconfirmed ^= bit
        spread(self.blocks, gpu, len(chain))
        spread(self.total, held, len(chain))


def _pieces(states: States, chain: Sequence[int], cuts: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches (start, stop, state) with one state each that go over none of the `cuts`."""
    look = states.get
    for low, high in pairwise(sorted({0, *cuts, len(chain)})):
        start, state = low, -1
        for first in range(low, high, _CHUNK):
            chunk = list(map(look, chain[first : min(first + _CHUNK, high)]))
            if chunk.count(state) == len(chunk):
                continue
            for at, new in enumerate(chunk, first):
                if new is None:
                    if at > start:
                        yield start, at, state
                    yield at, at + 1, 0
                    start, state = at + 1, -1
                elif new != state:
                    if at > start:
                        yield start, at, state
                    start, state = at, new
        if high > start:
            yield start, high, state
