from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from extproc.analysis.prefix_tree import NODE_BYTES, PrefixTree, common_bytes

# Few tokens, so that prompts share beginnings.
PROMPTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), min_size=1, max_size=12)), max_size=40
)


def tokens(ids) -> bytes:
    return array("I", ids).tobytes()


def common(one, other) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(PROMPTS)
def test_it_shares_what_brute_force_says_and_paths_are_the_prompts(prompts):
    tree = PrefixTree(1 << 30)
    earlier = []
    for namespace, ids in prompts:
        shared, path = tree.add(namespace, tokens(ids))
        assert shared == max((common(ids, other) for name, other in earlier if name == namespace), default=0)
        assert b"".join(node.run for node in path) == tokens(ids)
        assert PrefixTree.tokens_of(path[-1]) == tokens(ids)
        assert [node.start for node in path] == [0, *(node.end for node in path[:-1])]
        earlier.append((namespace, ids))
        for node in path:
            prefix = ids[: node.end]
            assert node.count == sum(
                other[: node.end] == prefix for name, other in earlier if name == namespace
            )
            assert node.ends == sum(other == prefix for name, other in earlier if name == namespace)


@given(PROMPTS)
def test_what_is_held_is_counted(prompts):
    tree = PrefixTree(1 << 30)
    for namespace, ids in prompts:
        tree.add(namespace, tokens(ids))
    nodes, held = count(tree)
    assert (tree.nodes, tree.held_bytes) == (nodes, held)


@given(PROMPTS, st.integers(3, 12))
def test_it_forgets_the_longest_unused_and_never_claims_what_it_forgot(prompts, room):
    tree = PrefixTree(room * (NODE_BYTES + 8))
    earlier = []
    for namespace, ids in prompts:
        shared, path = tree.add(namespace, tokens(ids))
        assert shared <= max((common(ids, other) for name, other in earlier if name == namespace), default=0)
        assert PrefixTree.tokens_of(path[-1]) == tokens(ids)  # what was just added is never forgotten
        earlier.append((namespace, ids))
        nodes, held = count(tree)
        assert (tree.nodes, tree.held_bytes) == (nodes, held)
        # The prompt itself, split at most in as many nodes as it has tokens, may go beyond the limit.
        assert held <= room * (NODE_BYTES + 8) + (len(ids) + 1) * (NODE_BYTES + 4)


def count(tree: PrefixTree) -> tuple[int, int]:
    nodes = list(tree.roots.values())
    for node in nodes:
        nodes.extend((node.children or {}).values())
    return len(nodes), sum(NODE_BYTES + len(node.run) for node in nodes)


def test_the_latest_used_are_kept():
    tree = PrefixTree(40 * (NODE_BYTES + 40))
    hot = tokens(range(10))
    tree.add("", hot)
    for at in range(500):
        tree.add("", tokens(range(1000 * (at + 1), 1000 * (at + 1) + 10)))
        assert tree.add("", hot)[0] == 10
    assert tree.forgotten > 4000
    assert tree.add("", tokens(range(1000, 1010)))[0] == 0


def test_forgotten_nodes_hold_nothing():
    tree = PrefixTree(3 * (NODE_BYTES + 40))
    _, path = tree.add("", tokens(range(10)))
    for at in range(1, 9):
        tree.add("", tokens(range(at * 100, at * 100 + 10)))
    assert PrefixTree.tokens_of(path[-1]) is None
    assert path[-1].run == b""


@given(PROMPTS)
def test_splits_are_told_and_keep_the_lower_node(prompts):
    seen = []
    tree = PrefixTree(1 << 30, lambda upper, lower: seen.append((upper, lower)))
    ends = {}
    for namespace, ids in prompts:
        _, path = tree.add(namespace, tokens(ids))
        ends.setdefault((namespace, tuple(ids)), path[-1])
    for (_, ids), node in ends.items():
        assert PrefixTree.tokens_of(node) == tokens(ids)
    assert all(upper.end <= lower.start for upper, lower in seen)


@given(st.binary(max_size=2000), st.integers(0, 2000), st.binary(min_size=1, max_size=3))
def test_common_bytes_is_the_common_beginning(text, at, change):
    other = text[:at] + change + text[at + 1 :]
    expected = common(text, other)
    assert common_bytes(text, other) == expected
    assert all(a == b for a, b in pairwise([common_bytes(text, other), common_bytes(other, text)]))
