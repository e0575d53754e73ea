from hypothesis import given
from hypothesis import strategies as st

from loadtests.peers.preble_tree import PrebleTree
from tests.loadtests.peers.support import Asking, document

LENGTHS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=20)


@given(LENGTHS)
def test_nodes_hold_every_prompt_and_know_their_place(prompts):
    tree, asking = PrebleTree(2), Asking(None)
    for name, blocks in prompts:
        leaf, splits = tree.insert(asking.request(document(name, blocks)), 0.0)
        path = list(leaf.path())
        assert sum(node.tokens for node in path) == blocks * 16 + 8
        for node in path:
            assert node.tokens_before == sum(above.tokens for above in node.path()) - node.tokens
        for lower, upper in splits:
            assert lower.parent is upper
        assert leaf.important() in path


def test_a_split_copies_what_is_known_of_the_stretch():
    tree, asking = PrebleTree(2), Asking(None)
    leaf, _ = tree.insert(asking.request(document(0, 6)), 0.0)
    tree.send(leaf, 1)
    leaf.allocated = {1}
    _, ((lower, upper),) = tree.insert(asking.request(document(0, 4)), 0.0)
    assert lower is leaf
    assert (upper.tokens, lower.tokens) == (64, 40)
    assert upper.allocated == {1}
    assert upper.under_way == [0, 1]
    assert upper.cached == {1}
    tree.finish(leaf, 1)
    assert upper.under_way == lower.under_way == [0, 0]


def test_a_full_worker_forgets_the_least_recently_used_that_is_not_in_use():
    tree, asking = PrebleTree(1), Asking(None)
    leaves = []
    for name in range(3):
        leaf, _ = tree.insert(asking.request(document(name, 6)), float(name))
        tree.send(leaf, 0)
        leaves.append(leaf)
    tree.finish(leaves[1], 0)
    tree.finish(leaves[2], 0)
    tree.evict(0, 2 * 104)
    assert [bool(leaf.cached) for leaf in leaves] == [True, False, True]
    tree.evict(0, 0)
    assert [bool(leaf.cached) for leaf in leaves] == [True, False, False]


def test_what_would_go_is_enough_for_the_new_tokens():
    tree, asking = PrebleTree(1), Asking(None)
    for name in range(4):
        leaf, _ = tree.insert(asking.request(document(name, 6)), float(name))
        tree.send(leaf, 0)
        tree.finish(leaf, 0)
    victims = tree.would_evict(0, 150)
    assert [victim.letters[0][0] for victim in victims] == [document(0, 1)[0], document(1, 1)[0]]
    assert tree.would_evict(0, 0) == []
