import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.assumed_cache import LIFETIME_S, AssumedCache
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
    cache.record(W, [1, 2, 3], None, 0.0)
    assert hit(index, [1, 2, 3, 4]) == 3
    assert hit(index, [2, 3]) == 2  # the index matches what it is asked; chains make it contiguous
    assert hit(index, [9]) == 0


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning():
    index, cache = make()
    cache.record(W, [1, 2, 3], 4, 0.0)
    cache.record(W, [11, 12], 4, 0.0)
    assert hit(index, [1, 2, 3]) == 2
    cache.record(W, [1, 2], 4, 0.0)
    cache.record(W, [21, 22], 4, 0.0)
    assert hit(index, [11, 12]) == 0
    assert hit(index, [1, 2]) == 2


def test_what_the_engine_did_not_have_is_forgotten():
    index, cache = make()
    cache.record(W, [1, 2, 3], None, 0.0)
    cache.forget(W, [2, 3, 99])
    assert hit(index, [1, 2, 3]) == 1
    assert cache.blocks(W) == 1


def test_dropping_leaves_requests_in_flight_alone():
    index, cache = make()
    index.reserve(W, [1, 2])
    cache.record(W, [1, 2, 3], None, 0.0)
    cache.drop(W)
    assert hit(index, [1, 2, 3]) == 2
    assert W not in cache


def test_a_removed_worker_takes_its_assumptions_along():
    index, cache = make()
    cache.record(W, [1], None, 0.0)
    index.remove_worker(W)
    cache.remove_worker(W)
    index.add_worker(W, "m", "t")
    assert hit(index, [1]) == 0
    cache.drop(W)


def test_answers_take_room_and_go_before_the_prompts_they_belong_to():
    index, cache = make()
    cache.record(W, [1, 2, 3], 10, 0.0, answer_blocks=4)
    cache.record(W, [11, 12, 13], 10, 1.0, answer_blocks=4)
    assert hit(index, [1, 2, 3]) == 3  # the first answer made room
    cache.record(W, [21], 10, 2.0)
    assert hit(index, [1, 2, 3]) == 2
    assert cache.blocks(W) == 6


def test_a_request_on_its_way_makes_room_and_keeps_what_it_uses():
    index, cache = make()
    cache.record(W, [1, 2, 3], 8, 0.0)
    cache.record(W, [11, 12], 8, 1.0)
    cache.admit(W, "a", [1, 2, 21], 6, 8)  # 6 of 8 are taken, so only two unused ones remain
    assert hit(index, [1, 2]) == 2
    assert hit(index, [11, 12]) == 2
    assert hit(index, [3]) == 0
    cache.admit(W, "b", [31, 32], 2, 8)
    assert hit(index, [11]) == 0
    assert hit(index, [1, 2]) == 2
    cache.done(W, "a", 3.0)
    cache.done(W, "b", 3.0)
    cache.record(W, [31, 32], 8, 3.0)
    assert hit(index, [1, 2]) == 2
    assert hit(index, [21]) == 0  # it was never said to have been served
    cache.done(W, "a", 4.0)


def test_what_two_requests_use_stays_until_both_are_done():
    index, cache = make()
    cache.record(W, [1, 2], 4, 0.0)
    for ticket in "ab":
        cache.admit(W, ticket, [1, 2], 2, 4)
    cache.done(W, "a", 1.0)
    cache.record(W, [11, 12, 13, 14], 4, 2.0)
    assert hit(index, [1, 2]) == 2
    cache.done(W, "b", 3.0)
    cache.record(W, [21, 22, 23, 24], 4, 4.0)
    assert hit(index, [1, 2]) == 0


def test_what_was_not_used_for_long_is_forgotten():
    index, cache = make()
    cache.record(W, [1, 2], None, 0.0)
    cache.record(W, [1, 3], None, 10.0)
    cache.expire(LIFETIME_S)
    assert [hit(index, [block]) for block in (1, 2, 3)] == [1, 0, 1]
    assert index.stats(W).reservations == cache.blocks(W) == 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("admit", "done", "record", "forget", "expire")),
            st.lists(st.integers(0, 9), max_size=5, unique=True),
            st.integers(0, 4),
        ),
        max_size=40,
    ),
    st.integers(1, 12),
)
def test_whatever_happens_reservations_are_what_is_assumed(steps, capacity):
    index, cache = make()
    for now, (step, chain, number) in enumerate(steps):
        match step:
            case "admit":
                if f"{number}" not in getattr(cache._workers.get(W), "running", {}):
                    cache.admit(W, f"{number}", chain, len(chain) + number, capacity)
            case "done":
                cache.done(W, f"{number}", float(now))
            case "record":
                cache.record(W, chain, capacity, float(now), number)
            case "forget":
                cache.forget(W, chain)
            case "expire":
                cache.expire(now * LIFETIME_S / 10)
        assert index.stats(W).reservations == cache.blocks(W)
    for number in range(5):
        cache.done(W, f"{number}", 99.0)
    cache.record(W, [77], capacity, 99.0)
    assert cache.blocks(W) <= capacity
    cache.drop(W)
    assert index.stats(W).reservations == 0


@given(st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), max_size=30), st.integers(1, 8))
def test_it_never_holds_more_than_the_engine_and_leaves_nothing_behind(chains, capacity):
    index, cache = make()
    for chain in chains:
        cache.record(W, chain, capacity, 0.0)
        assert cache.blocks(W) <= capacity
        assert index.stats(W).reservations == cache.blocks(W)
        for block in chain[:capacity]:
            assert hit(index, [block]) == 1
    cache.drop(W)
    assert index.stats(W).reservations == 0


def test_unbalanced_use_is_impossible():
    index, cache = make()
    cache.record(W, [1], None, 0.0)
    cache.drop(W)
    with pytest.raises(ValueError, match="not reserved"):
        index.unreserve(W, [1])
