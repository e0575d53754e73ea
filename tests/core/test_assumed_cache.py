import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.assumed_cache import AssumedCache
from extproc.core.kv_index import KvIndex
from tests.support.core import worker

W = worker(0)


def make():
    index = KvIndex()
    index.add_worker(W, "m", "t")
    return index, AssumedCache(index)


def hit(index, chain):
    return next((match.blocks for match in index.match(chain)), 0)


def test_a_served_prefix_is_found_again():
    index, cache = make()
    cache.record(W, [1, 2, 3], None)
    assert hit(index, [1, 2, 3, 4]) == 3
    assert hit(index, [2, 3]) == 2  # the index matches what it is asked; chains make it contiguous
    assert hit(index, [9]) == 0


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning():
    index, cache = make()
    cache.record(W, [1, 2, 3], 4)
    cache.record(W, [11, 12], 4)
    assert hit(index, [1, 2, 3]) == 2
    cache.record(W, [1, 2], 4)
    cache.record(W, [21, 22], 4)
    assert hit(index, [11, 12]) == 0
    assert hit(index, [1, 2]) == 2


def test_what_the_engine_did_not_have_is_forgotten():
    index, cache = make()
    cache.record(W, [1, 2, 3], None)
    cache.forget(W, [2, 3, 99])
    assert hit(index, [1, 2, 3]) == 1
    assert cache.blocks(W) == 1


def test_dropping_leaves_requests_in_flight_alone():
    index, cache = make()
    index.reserve(W, [1, 2])
    cache.record(W, [1, 2, 3], None)
    cache.drop(W)
    assert hit(index, [1, 2, 3]) == 2
    assert W not in cache


def test_a_removed_worker_takes_its_assumptions_along():
    index, cache = make()
    cache.record(W, [1], None)
    index.remove_worker(W)
    cache.remove_worker(W)
    index.add_worker(W, "m", "t")
    assert hit(index, [1]) == 0
    cache.drop(W)


@given(st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), max_size=30), st.integers(1, 8))
def test_it_never_holds_more_than_the_engine_and_leaves_nothing_behind(chains, capacity):
    index, cache = make()
    for chain in chains:
        cache.record(W, chain, capacity)
        assert cache.blocks(W) <= capacity
        assert index.stats(W).reservations == cache.blocks(W)
        for block in chain[:capacity]:
            assert hit(index, [block]) == 1
    cache.drop(W)
    assert index.stats(W).reservations == 0


def test_unbalanced_use_is_impossible():
    index, cache = make()
    cache.record(W, [1], None)
    cache.drop(W)
    with pytest.raises(ValueError, match="not reserved"):
        index.unreserve(W, [1])
