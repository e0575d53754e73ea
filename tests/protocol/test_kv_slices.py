import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.kv_index import KvIndex
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from extproc.protocol.kv_slices import portions
from tests.support.core import hashes, stored, worker

W = worker(0)


def test_small_events_stay_together_and_whole():
    events = (stored(range(64)), BlockRemoved((1, 2)), AllBlocksCleared())
    assert list(portions(events, 6)) == [events]
    assert list(portions(events, 5)) == [events[:1], events[1:]]
    assert list(portions((), 5)) == [()]


def test_a_long_event_is_several():
    keys = (("salt",), *[None] * 9)
    event = stored(range(160), parent=99, extra_keys=keys, tier=Tier.CPU)
    parts = [part for (part,) in portions([event], 4)]
    assert [part.block_hashes for part in parts] == [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10)]
    assert [part.parent for part in parts] == [99, 4, 8]
    assert [token for part in parts for token in part.token_ids] == list(range(160))
    assert sum((part.extra_keys for part in parts), ()) == keys
    assert {part.tier for part in parts} == {Tier.CPU}
    removed = [part.block_hashes for (part,) in portions([BlockRemoved((1, 2, 3))], 2)]
    assert removed == [(1, 2), (3,)]


@pytest.mark.parametrize(
    "event",
    [BlockStored((1, 2, 3), None, [1, 2], 16), BlockStored((1, 2, 3), None, range(3), 1, extra_keys=(None,))],
)
def test_what_does_not_fit_together_is_left_as_it_is(event):
    assert list(portions([event], 2)) == [(), (event,)]


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.booleans(), PATHS, st.integers(0, 3)), max_size=12), st.integers(1, 5))
def test_an_index_learns_the_same_from_portions(steps, blocks):
    events = []
    for removes, path, skip in steps:
        names = [hash(tuple(path[: at + 1])) for at in range(len(path))]
        first = min(skip, len(path) - 1)
        if removes:
            events.append(BlockRemoved(tuple(reversed(names[first:]))))
        else:
            tokens = [token for bit in path[first:] for token in (bit, 7)]
            events.append(BlockStored(tuple(names[first:]), names[first - 1] if first else None, tokens, 2))
    whole, sliced = KvIndex(), KvIndex()
    for index in (whole, sliced):
        index.add_worker(W, "model", "tokenizer")
    orphaned = False
    for event in events:
        whole.apply(W, event)
        orphaned |= whole.stats(W).orphans > 0
    for portion in portions(events, blocks):
        for event in portion:
            sliced.apply(W, event)
    for leaf in range(64):
        chain = hashes([token for bit in range(6) for token in (leaf >> bit & 1, 7)] + [0], block_size=2)
        assert sliced.match(chain) == whole.match(chain)
    # Of orphans less is kept: a portion of which nothing is left is not waited for.
    assert orphaned or sliced.stats(W) == whole.stats(W)
