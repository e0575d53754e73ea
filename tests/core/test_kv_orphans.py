import pytest

from extproc.core.kv_orphans import Orphans
from extproc.core.types import BlockRemoved, BlockStored, Tier


def stored(*handles, parent=99, tier=Tier.GPU) -> BlockStored:
    return BlockStored(tuple(handles), parent, [1] * len(handles), 1, tier=tier)


def test_wait_for_the_parent_in_order() -> None:
    orphans = Orphans(10)
    orphans.add(stored(1, 2))
    orphans.add(stored(1))
    assert orphans.blocks == 3
    assert orphans.remove(2, Tier.GPU, 0)
    assert 99 in orphans
    first, second, removal = orphans.take(99)
    assert (first.block_hashes, second.block_hashes) == ((1, 2), (1,))
    assert removal == BlockRemoved((2,))
    assert 99 not in orphans
    assert orphans.blocks == 0


def test_removed_completely_is_forgotten() -> None:
    orphans = Orphans(10)
    orphans.add(stored(1, 2))
    orphans.add(stored(1, tier=Tier.CPU))
    assert orphans.remove(1, Tier.GPU, 0)
    assert not orphans.remove(1, Tier.GPU, 0)
    assert not orphans.remove(7, Tier.GPU, 0)
    assert orphans.remove(1, Tier.CPU, 0)
    assert orphans.remove(2, Tier.GPU, 0)
    assert (99 in orphans, orphans.blocks, orphans.dropped) == (False, 0, 0)
    assert not orphans.remove(2, Tier.GPU, 0)


def test_oldest_go_when_there_are_too_many() -> None:
    orphans = Orphans(4)
    for parent in range(10, 15):
        orphans.add(stored(parent * 10, parent * 10 + 1, parent=parent))
    assert [parent in orphans for parent in range(10, 15)] == [False, False, False, True, True]
    assert (orphans.blocks, orphans.dropped) == (4, 6)
    orphans.add(stored(*range(5), parent=77))
    assert (77 in orphans, orphans.blocks, orphans.dropped) == (False, 4, 11)


def test_one_block_can_wait_in_events_with_different_parents() -> None:
    """A longer and a shorter event about the same chain: block 3 follows block 2 in both."""
    orphans = Orphans(10)
    orphans.add(stored(3, parent=2))
    orphans.add(stored(2, 3, 4, parent=1))
    assert orphans.remove(3, Tier.GPU, 0)
    assert (2 in orphans, 1 in orphans, orphans.blocks) == (False, True, 3)
    assert orphans.remove(3, Tier.GPU, 0)
    assert not orphans.remove(3, Tier.GPU, 0)
    assert [len(event.block_hashes) for event in orphans.take(1)] == [3, 1]


def test_block_without_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="no orphan"):
        Orphans(10).add(stored(1, parent=None))


def test_clear_forgets_all_but_the_count() -> None:
    orphans = Orphans(1)
    orphans.add(stored(1, 2))
    orphans.add(stored(3))
    orphans.clear()
    assert (99 in orphans, orphans.blocks, orphans.dropped) == (False, 0, 2)
    assert not orphans.remove(3, Tier.GPU, 0)
