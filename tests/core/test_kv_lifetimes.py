from hypothesis import given
from hypothesis import strategies as st

from extproc.core.kv_lifetimes import SAMPLE, BlockLifetimes, Evictions
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from tests.support.core import worker


def stored(*handles, **fields):
    return BlockStored(tuple(handles), None, (), 16, **fields)


def removed(*handles, **fields):
    return BlockRemoved(tuple(handles), **fields)


def test_the_age_of_a_block_counts_from_its_storing():
    blocks = BlockLifetimes()
    assert blocks.apply(worker(), [stored(16, 32)], 10.0) == Evictions(0, ())
    assert blocks.apply(worker(), [removed(16)], 14.0) == Evictions(1, (4.0,))
    # Stored again: its life begins again.
    blocks.apply(worker(), [stored(32)], 20.0)
    assert blocks.apply(worker(), [removed(32)], 21.5) == Evictions(1, (1.5,))


def test_workers_have_blocks_of_their_own():
    blocks = BlockLifetimes()
    blocks.apply(worker(0), [stored(16)], 1.0)
    blocks.apply(worker(1), [stored(16)], 5.0)
    assert blocks.apply(worker(0), [removed(16)], 6.0) == Evictions(1, (5.0,))
    assert blocks.apply(worker(1), [removed(16)], 6.0) == Evictions(1, (1.0,))


def test_what_is_no_eviction_from_gpu_memory_does_not_count():
    blocks = BlockLifetimes()
    blocks.apply(worker(), [stored(16), stored(32, tier=Tier.CPU), stored(48, group=1)], 1.0)
    assert blocks.apply(worker(), [removed(32, tier=Tier.CPU), removed(48, group=1)], 2.0) == Evictions(0, ())
    assert blocks.apply(worker(), [AllBlocksCleared()], 3.0) == Evictions(0, ())
    assert blocks.apply(worker(), [removed(16)], 4.0) == Evictions(1, ())


def test_a_worker_that_is_forgotten_leaves_nothing():
    blocks = BlockLifetimes()
    blocks.apply(worker(), [stored(16)], 1.0)
    blocks.forget(worker())
    assert len(blocks) == 0
    assert blocks.apply(worker(), [removed(16)], 4.0) == Evictions(1, ())


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=80))
def test_all_evictions_are_counted_and_only_a_sample_is_remembered(steps):
    blocks, alive, evicted, ages = BlockLifetimes(), {}, 0, []
    for now, (store, handle) in enumerate(steps):
        if store:
            alive[handle] = now
        found = blocks.apply(worker(), [stored(handle) if store else removed(handle)], float(now))
        if not store:
            evicted += 1
            born = alive.pop(handle, None)
            expected = (float(now - born),) if born is not None and handle % SAMPLE == 0 else ()
            assert found == Evictions(1, expected)
            ages += found.ages_s
        assert len(blocks) == sum(handle % SAMPLE == 0 for handle in alive)
    assert len(ages) <= evicted
