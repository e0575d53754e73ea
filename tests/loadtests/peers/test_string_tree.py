from hypothesis import given
from hypothesis import strategies as st

from loadtests.peers.string_tree import StringTree

PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=8), st.integers(0, 2)), min_size=1, max_size=25
)


def chained(letters):
    """As hashes are: each stands for everything up to it."""
    return [hash(tuple(letters[: at + 1])) for at in range(len(letters))]


def known(prompts, letters):
    common = [
        next(
            (i for i, (a, b) in enumerate(zip(p, letters, strict=False)) if a != b), min(len(p), len(letters))
        )
        for p, _ in prompts
    ]
    return max(common, default=0)


@given(PROMPTS, st.lists(st.integers(0, 2), max_size=9))
def test_the_longest_known_beginning_is_found_with_someone_who_was_sent_it(prompts, letters):
    tree = StringTree(3, 16)
    for prompt, worker in prompts:
        tree.insert(chained(prompt), worker)
    match = tree.match(chained(letters))
    assert match.blocks == known(prompts, letters)
    holders = {w for p, w in prompts if p[: match.blocks] == letters[: match.blocks]}
    if match.blocks:
        assert set(match.workers) == holders
        assert match.worker in holders
    else:
        assert set(match.workers) == {0, 1, 2}


@given(PROMPTS)
def test_a_worker_s_size_is_what_it_was_sent_counted_once(prompts):
    tree = StringTree(3, 16)
    for prompt, worker in prompts:
        tree.insert(chained(prompt), worker)
    for worker in range(3):
        mine = {tuple(p[: i + 1]) for p, w in prompts if w == worker for i in range(len(p))}
        assert tree.sizes[worker] == len(mine) * 16 * 4


@given(PROMPTS, st.integers(0, 12))
def test_eviction_leaves_no_worker_above_the_limit_and_forgets_the_oldest_first(prompts, limit):
    tree = StringTree(3, 16)
    for prompt, worker in prompts:
        tree.insert(chained(prompt), worker)
    before = list(tree.sizes)
    tree.evict(limit * 64)
    assert all(size <= max(limit * 64, 0) or size == 0 for size in tree.sizes)
    assert all(after == was for after, was in zip(tree.sizes, before, strict=True) if was <= limit * 64)


def test_the_least_recently_sent_prompt_goes_first():
    tree = StringTree(2, 16)
    for letters in ([1, 1], [2, 2], [3, 3], [1, 1]):
        tree.insert(chained(letters), 0)
    tree.evict(4 * 64)
    assert [tree.match(chained([letter, letter])).blocks for letter in (1, 2, 3)] == [2, 0, 2]


def test_the_worker_that_made_a_node_answers_for_it():
    tree = StringTree(3, 16)
    tree.insert(chained([1, 2, 3]), 2)
    tree.insert(chained([1, 2, 4]), 0)
    assert tree.match(chained([1, 2, 9])).worker == 2  # the upper half keeps its maker
    assert tree.match(chained([1, 2, 4])).worker == 0
    assert tree.match(chained([1, 2, 3])).worker == 2
