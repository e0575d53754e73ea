import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.hashing import ChainMemo, chain, mix, prompt_chain, token_array

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)
sizes = st.integers(1, 16)


@given(tokens, sizes, st.integers(0, 2**64 - 1))
def test_chain_is_xxh3_over_little_endian_words_seeded_by_the_block_before(ids, size, seed):
    expected, previous = [], seed
    for start in range(0, len(ids) - size + 1, size):
        data = struct.pack(f"<{size}I", *ids[start : start + size])
        previous = xxhash.xxh3_64_intdigest(data, previous)
        expected.append(previous)
    assert chain(ids, size, seed) == expected


@given(tokens, tokens, sizes)
def test_equal_prefixes_give_equal_hash_prefixes_and_nothing_more(a, b, size):
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    left, right = chain(a, size, 7), chain(b, size, 7)
    same = shared // size
    assert left[:same] == right[:same]
    assert not set(left[same:]) & set(right[same:])


@pytest.mark.parametrize(("length", "blocks"), [(0, 0), (1, 0), (31, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_the_last_token_is_never_counted(length, blocks):
    assert len(prompt_chain(token_array(range(length)), 32, 0)) == blocks


def test_pitfall_41_a_later_block_of_another_prompt_is_no_hit():
    a, b = list(range(16)), list(range(100, 116))
    assert chain(b + a, 16, 0)[1] not in chain(a, 16, 0)


def test_negative_token_ids_are_refused():
    with pytest.raises(OverflowError):
        token_array([-1])


def test_mix_depends_on_what_is_mixed_in():
    assert len({mix(1, b"a"), mix(1, b"b"), mix(2, b"a")}) == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700), st.integers(1, 3)), max_size=12))
def test_what_is_remembered_is_what_hashing_gives(prompts):
    memo = ChainMemo(max_blocks=512)
    for kind, length, size in prompts:
        # Prompts of a kind begin alike, and differ from some token on.
        ids = token_array([*range(kind * 1000, kind * 1000 + length), length])
        assert memo.prompt_chain(ids, size, 5) == tuple(prompt_chain(ids, size, 5))
        assert memo.blocks <= 512 + 2 * 700


def test_a_memo_is_bounded_and_forgets_what_was_not_used_the_longest():
    memo = ChainMemo(max_blocks=64 * 8)
    kept = token_array(range(64 * 4 + 1))
    for first in range(1, 2000):
        memo.prompt_chain(token_array(range(first, first + 64 * 4 + 1)), 4, 0)
        memo.prompt_chain(kept, 4, 0)
        assert memo.blocks <= 64 * 10
    assert memo.hits >= 1998
    assert memo.misses <= 2000


def test_a_memo_of_no_size_remembers_nothing():
    memo = ChainMemo(0)
    ids = token_array(range(1000))
    assert memo.prompt_chain(ids, 4, 0) == memo.prompt_chain(ids, 4, 0) == tuple(prompt_chain(ids, 4, 0))
    assert memo.blocks == memo.hits == 0


def test_a_stretch_is_remembered_together_with_what_is_before_it():
    memo, stretch = ChainMemo(), 64 * 4
    memo.prompt_chain(token_array(range(3 * stretch + 1)), 4, 0)
    behind = token_array(range(stretch, 3 * stretch + 1))
    assert memo.prompt_chain(behind, 4, 0) == tuple(prompt_chain(behind, 4, 0))
    assert (memo.hits, memo.misses) == (0, 5)
    memo.prompt_chain(token_array(range(3 * stretch + 1)), 4, 0)
    assert (memo.hits, memo.misses) == (3, 5)
    longer = token_array([*range(2 * stretch), *range(9000, 9000 + stretch + 1)])
    assert memo.prompt_chain(longer, 4, 0) == tuple(prompt_chain(longer, 4, 0))
    assert (memo.hits, memo.misses) == (5, 6)
