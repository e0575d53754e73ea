from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.kv_reservations import Reservations


def lengths(tree, chain):
    """Leading blocks by slot."""
    found = {}
    for bits, length in tree.prefixes(chain):
        found.update({slot: length for slot in range(4) if bits >> 2 * slot & 1})
    return found


def test_a_prompt_is_found_as_far_as_it_was_sent():
    tree = Reservations()
    tree.reserve(0, range(100))
    tree.reserve(1, range(40))
    tree.reserve(2, [*range(70), *range(900, 950)])
    assert lengths(tree, range(100)) == {0: 100, 1: 40, 2: 70}
    assert lengths(tree, range(30)) == {0: 30, 1: 30, 2: 30}
    assert lengths(tree, [*range(69), 5000]) == {0: 69, 1: 40, 2: 69}
    assert lengths(tree, [5000]) == lengths(tree, []) == {}
    assert tree.blocks == 150


def test_a_chain_is_given_back_as_often_as_it_was_reserved():
    tree = Reservations()
    tree.reserve(0, range(10))
    tree.reserve(0, range(10))
    assert (tree.of(0).reserved, tree.of(0).in_use, tree.of(0).distinct) == (20, 10, 10)
    assert tree.unreserve(0, range(10))
    assert lengths(tree, range(10)) == {0: 10}
    assert tree.unreserve(0, range(10))
    assert not tree.unreserve(0, range(10))
    assert tree.blocks == tree.of(0).reserved == tree.of(0).distinct == 0


def test_what_is_not_reserved_cannot_be_given_back():
    tree = Reservations()
    tree.reserve(0, range(10))
    for slot, chain in ((0, range(5)), (0, range(20)), (0, [0, 9]), (0, [77]), (1, range(10))):
        assert not tree.unreserve(slot, chain)
    assert tree.of(0).reserved == 10


def test_a_worker_that_leaves_takes_all_it_holds_along():
    tree = Reservations()
    tree.reserve(0, range(10))
    tree.reserve(1, range(5))
    tree.assume(0, [*range(3), 77], 0.0, 2)
    tree.clear(0)
    assert lengths(tree, range(10)) == {1: 5}
    assert tree.of(0).distinct == tree.of(0).waiting == 0
    tree.clear(1)
    assert tree.blocks == 0


def test_memory_is_estimated():
    tree = Reservations()
    tree.reserve(0, range(1000))
    before = tree.memory_bytes
    assert before > 8000
    tree.reserve(1, range(1000))
    assert tree.memory_bytes == before


CHAINS = st.lists(st.integers(0, 1), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 2), CHAINS, st.booleans()), max_size=40))
def test_it_matches_what_counters_block_by_block_match(steps):
    tree, plain, open_chains = Reservations(), [Counter() for _ in range(3)], []
    for to, path, ends in steps:
        if ends and open_chains:
            held_by, chain = open_chains.pop(len(path) % len(open_chains))
            assert tree.unreserve(held_by, chain)
            plain[held_by].subtract(chain)
        else:
            chain = [hash(tuple(path[: at + 1])) for at in range(len(path))]
            tree.reserve(to, chain)
            plain[to].update(chain)
            open_chains.append((to, chain))
        for leaf in range(64):
            bits = [leaf >> at & 1 for at in range(6)]
            chain = [hash(tuple(bits[: at + 1])) for at in range(6)]
            expected = {}
            for slot in range(3):
                length = next((at for at, block in enumerate(chain) if plain[slot][block] <= 0), len(chain))
                if length:
                    expected[slot] = length
            assert lengths(tree, chain) == expected
        for slot in range(3):
            assert tree.of(slot).reserved == sum(plain[slot].values())
            assert tree.of(slot).in_use == tree.of(slot).distinct == sum(c > 0 for c in plain[slot].values())
    for slot, chain in open_chains:
        assert tree.unreserve(slot, chain)
    assert tree.blocks == 0
