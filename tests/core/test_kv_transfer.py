import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.kv_index import KvIndex
from extproc.core.kv_transfer import EnginePart
from extproc.core.types import BlockRemoved, BlockStored, Tier
from tests.support.core import hashes, stored, worker

W = worker(0)


def index() -> KvIndex:
    made = KvIndex()
    made.add_worker(W, "model", "tokenizer")
    return made


def moved(source: KvIndex, part_blocks: int) -> KvIndex:
    """Another index, with all that this one knows of the worker, by way of bytes."""
    target = index()
    for part in source.export(W, part_blocks):
        assert len(part.handles) <= part_blocks
        there = msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=EnginePart)
        target.restore(W, there)
    return target


def test_what_was_known_is_known_elsewhere_and_events_go_on() -> None:
    source = index()
    source.apply(W, stored(range(160)))
    target = moved(source, 4)
    chain = hashes(range(193))
    assert target.match(chain) == source.match(chain)
    assert target.block_size(W) == 16
    target.apply(W, stored(range(160, 192), first_handle=11, parent=10))
    assert target.match(chain)[0].blocks == 12
    target.apply(W, BlockRemoved((12, 11, 10)))
    assert target.match(chain)[0].blocks == 9
    assert target.faults(W) == source.faults(W)


def test_an_engine_with_holes_is_moved_with_them() -> None:
    source = index()
    source.apply(W, stored(range(96)))
    source.apply(W, BlockRemoved((2,)))
    chain = hashes(range(97))
    assert [match.blocks for match in source.match(chain)] == [1]
    target = moved(source, 8)
    assert target.match(chain) == source.match(chain)


def test_of_an_engine_that_told_nothing_there_is_one_empty_part() -> None:
    (part,) = index().export(W)
    assert part == EnginePart(None, None, (), (), (), ())
    assert moved(index(), 8).stats(W) == index().stats(W)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": (1,)},
        {"runs": ((None, 9),)},
        {"runs": ((None, 0), (None, 10))},
        {"handles": (1,) * 10},
        {"copies": ((10, 1),)},
        {"copies": ((0, 0),)},
    ],
)
def test_a_damaged_part_is_refused_and_changes_nothing(change) -> None:
    source, target = index(), index()
    source.apply(W, stored(range(160)))
    (part,) = source.export(W)
    with pytest.raises(ValueError, match="part of an index"):
        target.restore(W, part._replace(**change))
    assert target.stats(W) == index().stats(W)
    target.restore(W, part)
    with pytest.raises(ValueError, match="taken before"):
        target.restore(W, part)


def test_only_tracked_workers_can_be_moved() -> None:
    with pytest.raises(ValueError, match="not in the index"):
        index().export(worker(9))


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), PATHS, st.integers(0, 3), st.sampled_from([*Tier])),
        st.tuples(st.just("remove"), PATHS, st.just(0), st.sampled_from([*Tier])),
    ),
    max_size=30,
)


def name(path) -> int:
    return int("1" + "".join(map(str, path)), 2)


def play(target: KvIndex, steps) -> None:
    for what, path, skip, tier in steps:
        if what == "remove":
            target.apply(W, BlockRemoved((name(path),), tier))
            continue
        first = min(skip, len(path) - 1)
        names = tuple(name(path[: at + 1]) for at in range(first, len(path)))
        tokens = [token for bit in path[first:] for token in (bit, 7)]
        target.apply(W, BlockStored(names, name(path[:first]) if first else None, tokens, 2, tier=tier))


@given(EVENTS, EVENTS, st.integers(1, 7))
def test_a_moved_index_answers_and_goes_on_like_the_one_it_came_from(before, after, part_blocks) -> None:
    source = index()
    play(source, before)
    # Orphans stay behind, so none may be waiting.
    if source.stats(W).orphans:
        return
    target = moved(source, part_blocks)
    for _ in range(2):
        for leaf in range(32):
            chain = hashes([token for bit in range(5) for token in (leaf >> bit & 1, 7)] + [0], block_size=2)
            assert target.match(chain) == source.match(chain)
        ours, theirs = target.stats(W), source.stats(W)
        assert (ours.blocks, ours.gpu_copies, ours.slower_copies) == (
            theirs.blocks,
            theirs.gpu_copies,
            theirs.slower_copies,
        )
        for each in (source, target):
            play(each, after)
