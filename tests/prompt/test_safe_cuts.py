import itertools
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from extproc.prompt.safe_cuts import SafeCuts, safe_cuts
from tests.support.tokenizers import KINDS, made, real, real_names, texts

WORDS = {
    *(
        "gpt2",
        "llama3",
        "cl100k",
        "o200k",
        "deepseek",
        "digits",
        "gaps",
        "nfc-late",
        "overlaps",
        "late-overlaps",
    ),
}
CHAT = {
    *("llama3", "cl100k", "o200k", "digits", "gaps", "nfc-late", "words", "gpt2-space"),
    *("metaspace", "metaspace-always"),
}
lengths = st.sampled_from([(1, 2), (1, 5), (1, 18), (2, 12), (7, 20)])


@cache
def made_cuts(kind):
    return safe_cuts(made(kind))


@cache
def real_cuts(name):
    return safe_cuts(real(name))


@cache
def some_tokens(name):
    return [token.content for token in real(name).get_added_tokens_decoder().values()]


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(text=texts, length=lengths)
def test_pieces_have_the_ids_of_the_whole(kind, text, length):
    tokenizer = made(kind)
    pieces = made_cuts(kind).pieces(text, *length)
    assert "".join(pieces) == text
    assert [one for piece in pieces for one in ids(tokenizer, piece)] == ids(tokenizer, text)


@pytest.mark.parametrize("name", real_names())
@settings(max_examples=200)
@given(text=texts, length=lengths)
def test_pieces_have_the_ids_of_the_whole_with_real_tokenizers(name, text, length):
    tokenizer, added = real(name), some_tokens(name)
    text = text.replace("<|im_start|>", added[0]).replace("<think>", added[-1])
    pieces = real_cuts(name).pieces(text, *length)
    assert [one for piece in pieces for one in ids(tokenizer, piece)] == ids(tokenizer, text)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("overlaps", ["<<a>", "<a>", "<a>b", "<", "[x]]", " ", "x y"]),
        ("late-overlaps", ["[a", "[a]", "|", "{b|}", "{", " ", "b"]),
        ("words", [" fox", "fox", "=x=", "<think>", "a", " "]),
        ("strips", ["<mask>", "  ", "[R]", "<think>", "a"]),
        ("right", ["<|a|>", "<|b|>", "  ", "x"]),
        ("nfc-late", ["don't", "  ", "<think>", "a", "'"]),
        ("deepseek", ["<｜User｜>", "<think>", "<", "中", "1 ", "a."]),
    ],
)
def test_pieces_of_every_row_of_tokens_have_the_ids_of_the_whole(kind, parts):
    tokenizer, cuts = made(kind), made_cuts(kind)
    for row in itertools.product(parts, repeat=4):
        text = "".join(row)
        expected = ids(tokenizer, text)
        for cut in {tuple(cuts.pieces(text, *length)) for length in ((1, 8), (2, 9), (3, 10))}:
            assert [one for piece in cut for one in ids(tokenizer, piece)] == expected, cut


@given(one=texts, rest=texts, other=texts, length=lengths)
def test_texts_that_begin_alike_are_cut_alike(one, rest, other, length):
    cuts = made_cuts("llama3")
    first, second = cuts.pieces(one + rest, *length), cuts.pieces(one + other, *length)
    seen = 0
    for piece, same in zip(first, second, strict=False):
        seen += len(piece)
        if seen + 64 > len(one):  # the longest token, and what follows a cut
            break
        assert piece == same


@pytest.mark.parametrize("kind", KINDS)
def test_where_each_kind_can_be_cut(kind):
    cuts = safe_cuts(made(kind))
    assert (cuts.between is not None) == (kind in WORDS)
    assert (cuts.note is None) == (kind in WORDS)
    text = "".join(f"<|im_start|>user\n{'words of prose ' * 20}<|im_end|>\n" for _ in range(20))
    pieces = cuts.pieces(text, 100, 1000)
    if kind in CHAT:
        assert max(map(len, pieces)) < 1000
        assert all(piece.startswith(("<|im_start|>", "<|im_end|>")) for piece in pieces)
    elif kind in WORDS:
        assert max(map(len, pieces)) < 1400
    else:
        assert pieces == [text]


@pytest.mark.parametrize("name", real_names())
def test_real_tokenizers_can_be_cut_everywhere(name):
    cuts = safe_cuts(real(name))
    assert cuts.note is None
    for text in (
        "some words of prose. " * 500,
        "東京都の天気は晴れです。今日は，" * 500,
        "def f(x):\n\treturn x\n" * 500,
    ):
        assert max(map(len, cuts.pieces(text, 100, 400))) < 450


def test_a_tokenizer_that_forgets_at_random_is_not_cut():
    tokenizer = Tokenizer(models.BPE(dropout=0.1))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert safe_cuts(tokenizer).between is None
    assert safe_cuts(tokenizer).token is None


def test_added_tokens_that_depend_on_their_left_are_no_place_for_a_cut():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens(
        [AddedToken("<a>", lstrip=True), AddedToken("[b]", single_word=True), AddedToken("word")]
    )
    assert safe_cuts(tokenizer).token is None
    tokenizer.add_tokens([AddedToken("{c}", rstrip=True)])
    assert safe_cuts(tokenizer).token.pattern == re.escape("{c}")


def test_no_place_is_looked_for_without_end():
    cuts = SafeCuts(re.compile("<x>"), re.compile("[a] "))
    far = "b" * 40_000
    assert cuts.pieces(far + "a a" + far, 10, 20) == [far + "a a" + far]
    assert cuts.pieces(far + "<x>" + far, 10, 20) == [far, "<x>" + far]
    assert cuts.pieces("b" * 9000 + "a a" + far, 10, 20) == ["b" * 9000 + "a", " a" + far]
