import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.workloads.history import History, key_of, prefix_blocks

COMMON = [10, 11, 12, 13, 14]
STRETCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 70)), max_size=8)


def grown(stretches, block_size):
    history = History(block_size, 7)
    for content, tokens in stretches:
        history.extend(content, tokens)
    return history


def spelled(stretches):
    """Each token as what it really stands for: its stretch's name, its place in it."""
    return [(index, content, place) for index, (content, n) in enumerate(stretches) for place in range(n)]


@given(STRETCHES, STRETCHES, STRETCHES, st.integers(1, 20))
def test_histories_share_exactly_the_blocks_of_stretches_named_alike_from_the_beginning(
    common, left, right, block_size
):
    one, two = (grown(common + rest, block_size).blocks for rest in (left, right))
    same = [s for s in common if s[1]]
    a, b = ([s for s in common + rest if s[1]] for rest in (left, right))
    while len(same) < min(len(a), len(b)) and a[len(same)] == b[len(same)]:
        same.append(a[len(same)])
    # A stretch that begins alike but is of another length is alike as far as both go.
    tokens = sum(n for _, n in same)
    if len(same) < min(len(a), len(b)) and a[len(same)][0] == b[len(same)][0]:
        tokens += min(a[len(same)][1], b[len(same)][1])
    shared = sum(1 for x, y in zip(one, two, strict=False) if x == y)
    assert shared == tokens // block_size
    assert one[:shared] == two[:shared]


def test_where_a_stretch_begins_is_part_of_what_it_is():
    one, two = (grown([(1, n), (2, 64)], 16).blocks for n in (16, 32))
    assert one[0] == two[0]
    assert not set(one[1:]) & set(two[1:])


@given(STRETCHES, st.integers(1, 20))
def test_there_is_one_block_for_every_full_block_of_tokens(stretches, block_size):
    history = grown(stretches, block_size)
    assert history.tokens == len(spelled(stretches))
    assert len(history.blocks) == history.tokens // block_size
    assert len(set(history.blocks)) == len(history.blocks)
    assert all(0 <= block < 2**64 for block in history.blocks)


def test_a_fork_begins_alike_and_goes_its_own_way():
    history = grown([(1, 40)], 16)
    fork = history.fork()
    fork.extend(2, 40)
    history.extend(3, 40)
    assert fork.blocks[:2] == history.blocks[:2]
    assert not set(fork.blocks[2:]) & set(history.blocks[2:])


def test_a_history_cannot_shrink():
    with pytest.raises(ValueError, match="-1"):
        History(16, 0).extend(1, -1)


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 5))
def test_blocks_of_named_prefixes_agree_where_the_names_do(block_size, id_tokens, alike):
    one = prefix_blocks([*COMMON[:alike], 1, 2], id_tokens, (alike + 2) * id_tokens, block_size)
    two = prefix_blocks([*COMMON[:alike], 3, 4], id_tokens, (alike + 2) * id_tokens, block_size)
    shared = alike * id_tokens // block_size
    assert one[:shared] == two[:shared]
    assert not set(one[shared:]) & set(two[shared:])


def test_blocks_of_named_prefixes_can_be_made_from_the_middle_on():
    ids = list(range(10))
    assert prefix_blocks(ids, 64, 640, 16, first=7) == prefix_blocks(ids, 64, 640, 16)[7:]


def test_keys_depend_on_every_part_and_its_place():
    keys = {key_of(1, 2), key_of(2, 1), key_of(12), key_of("1", "2", "")}
    assert len(keys) == 4
    assert key_of("a", 1) == key_of("a", 1)
