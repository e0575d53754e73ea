from hypothesis import given
from hypothesis import strategies as st

from extproc.core.hashing import chain
from extproc.core.kv_chain import event_chain
from extproc.core.namespace import LONGEST_SALT, Namespace, brief_salt
from extproc.core.types import BlockStored

REVISIONS = ("model", "tokenizer")
TOKENS = list(range(12))


def hashes(extra=None, *, tokens=TOKENS, parent=None, adapter=None, size=4, count=3):
    event = BlockStored(tuple(range(count)), None, tokens, size, adapter, extra)
    return event_chain(event, parent, *REVISIONS)


def prompt(adapter=None, salt=None, tokens=TOKENS):
    return chain(tokens, 4, Namespace(*REVISIONS, adapter, salt).seed)


def test_meets_the_chain_of_a_request() -> None:
    assert hashes() == prompt()
    assert hashes((None, None, None)) == prompt()
    assert hashes(([], None, ())) == prompt()


def test_child_goes_on_from_its_parent() -> None:
    first = hashes(tokens=TOKENS[:4], count=1)
    assert first is not None
    assert hashes(tokens=TOKENS[4:], count=2, parent=first[0]) == prompt()[1:]


def test_c37_salts_give_distinct_chains_and_stand_in_the_first_block_only() -> None:
    salted = [hashes(((salt,), None, None)) for salt in ("a", "b")]
    assert salted == [prompt(salt="a"), prompt(salt="b")]
    every = [*salted, hashes()]
    assert len({block for blocks in every if blocks for block in blocks}) == 9


def test_adapter_stands_on_every_block() -> None:
    assert hashes((("lA",), ("lA",), ("lA",)), adapter="lA") == prompt(adapter="lA")
    assert hashes(None, adapter="lA") == prompt(adapter="lA")
    assert hashes((("lA", "s"), ("lA",), ("lA",)), adapter="lA") == prompt("lA", "s")


def test_long_salts_give_the_chain_of_what_stands_for_them() -> None:
    long = "s" * (LONGEST_SALT + 1)
    assert hashes(((long,), None, None)) == prompt(salt=brief_salt(long)) != prompt(salt=long)


def test_salt_that_spells_like_the_adapter() -> None:
    assert hashes((("x", "x"), ("x",), ("x",)), adapter="x") == prompt("x", "x")
    assert hashes((("x",), ("x",), ("x",)), adapter="x") == prompt("x")
    assert hashes((("x",), None, None)) == prompt(None, "x")


def test_image_changes_every_block_from_its_own_on() -> None:
    text = prompt()
    image = hashes((None, (["img", 2],), None))
    other = hashes((None, (["gmi", 2],), None))
    moved = hashes((None, (["img", 3],), None))
    assert image is not None
    assert image[0] == text[0]
    assert not set(image[1:]) & set(text)
    assert other is not None
    assert moved is not None
    assert len({image[1], other[1], moved[1]}) == 3
    assert len({image[2], other[2], moved[2]}) == 3


def test_image_in_the_first_block_with_and_without_salt() -> None:
    bare, salted = hashes(((["img", 0],), None, None)), hashes(((["img", 0], "s"), None, None))
    assert bare is not None
    assert salted is not None
    assert not set(bare) & {*salted, *prompt(), *prompt(salt="s")}


def test_bare_string_behind_the_first_block_is_no_salt() -> None:
    first = prompt()[0]
    behind = hashes((("img",), None), tokens=TOKENS[4:], count=2, parent=first)
    assert behind is not None
    assert not set(behind) & set(prompt())


def test_digest_of_embeddings_counts() -> None:
    assert hashes(((b"\1\2",), None, None)) != hashes(((b"\1\3",), None, None))


def test_tokens_that_do_not_fit_the_blocks_are_refused() -> None:
    assert hashes(tokens=TOKENS[:11]) is None
    assert hashes(tokens=[]) is None
    assert hashes(size=0) is None
    assert hashes((None,)) is None
    assert hashes(tokens=[-1, *TOKENS[1:]]) is None
    assert hashes(tokens=[1 << 40, *TOKENS[1:]]) is None


KEYS = st.lists(
    st.one_of(
        st.sampled_from(["", "a", "b", "ab", "1"]),
        st.binary(max_size=2),
        st.tuples(st.text("ab"), st.integers(0, 12)),
    ),
    max_size=3,
).map(tuple)


@given(KEYS, KEYS, st.sampled_from([None, "a", "ab"]), st.sampled_from([None, "a", "ab"]))
def test_different_keys_never_share_a_block(one, other, adapter, second) -> None:
    def split(keys, name):
        keys = list(keys)
        salts = [key for key in keys if isinstance(key, str)]
        if salts:
            del keys[len(keys) - 1 - keys[::-1].index(salts[-1])]
        return name, salts[-1] if salts else None, keys

    def published(keys, name):
        return ((*([name] if name else ()), *keys), None, None)

    left, right = (
        hashes(published(one, adapter), adapter=adapter),
        hashes(published(other, second), adapter=second),
    )
    assert left is not None
    assert right is not None
    if split(one, adapter) == split(other, second):
        assert left == right
    else:
        assert not set(left) & set(right)


def test_hashes_that_are_ours_already_are_taken_as_they_are() -> None:
    event = BlockStored((7, 8), None, (), 4, chained=True)
    assert event_chain(event, None, *REVISIONS) == [7, 8]
    assert event_chain(event, 6, *REVISIONS) == [7, 8]
    assert event_chain(BlockStored((7, b"8"), None, (), 4, chained=True), None, *REVISIONS) is None
