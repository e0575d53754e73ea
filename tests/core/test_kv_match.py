from hypothesis import given
from hypothesis import strategies as st

from extproc.core.kv_match import Race, crossed, halve, spread
from extproc.core.kv_states import CONFIRMED, OFFLOADED, WIDTH

SIZE = st.integers(1, 300)


def test_a_length_is_spread_over_every_worker():
    lengths = {}
    spread(lengths, 0b10100, 7)
    assert lengths == {0b100: 7, 0b10000: 7}


@given(SIZE, st.lists(st.integers(1, 300), min_size=1, max_size=9))
def test_halving_finds_where_each_worker_drops_out(size, depths):
    states = {}
    for slot, depth in enumerate(depths):
        for block in range(depth):
            states[block] = states.get(block, 0) | CONFIRMED << WIDTH * slot
    everyone = sum(CONFIRMED << WIDTH * slot for slot in range(len(depths)))
    found = {}
    for bits, length in halve(states, range(size), everyone):
        spread(found, bits, length)
    assert found == {CONFIRMED << WIDTH * slot: min(size, depth) for slot, depth in enumerate(depths)}


@given(
    st.integers(1, 200),
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 199), max_size=8),  # not on the GPU
            st.sets(st.integers(0, 199), max_size=8),  # in a slower tier
            st.integers(0, 200),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_the_race_is_won_as_in_a_walk_of_each_worker_alone(size, workers):
    states, sent, expected = {}, {}, {}
    for slot, (missing, slower, ours) in enumerate(workers):
        bit = 1 << WIDTH * slot
        for block in range(200):
            state = (block not in missing) * CONFIRMED | (block in slower) * OFFLOADED
            if state:
                states[block] = states.get(block, 0) | state << WIDTH * slot
        if ours:
            sent[bit] = ours
        blocks = next((at for at in range(size) if at in missing and at >= ours), size)
        total = next((at for at in range(size) if at in missing - slower and at >= ours), size)
        expected[bit] = (blocks, total, len({at for at in missing if at < min(ours, blocks)}))
    race = Race(states, range(size), sum(expected), {bit: min(size, ours) for bit, ours in sent.items()})
    found = {bit: (race.blocks[bit], race.total[bit], race.waiting.get(bit, 0)) for bit in expected}
    assert found == expected


LENGTHS = st.lists(st.integers(0, 3), min_size=4, max_size=4)


@given(LENGTHS, LENGTHS)
def test_two_lists_of_groups_are_crossed(one, other):
    def groups(lengths):
        return [
            (sum(1 << at for at in range(4) if lengths[at] == value), value) for value in {*lengths} - {0}
        ]

    found = {}
    for bits, *both in crossed(groups(one), groups(other)):
        assert bits
        for at in range(4):
            if bits >> at & 1:
                assert at not in found
                found[at] = tuple(both)
    assert found == {at: both for at, both in enumerate(zip(one, other, strict=True)) if any(both)}
