import itertools
import unicodedata
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from extproc.prompt.split_pattern import SYMBOLS, PatternError, parse
from tests.support.tokenizers import PATTERNS


def at(char):
    (found,) = [index for index, symbol in enumerate(SYMBOLS) if symbol.low <= ord(char) <= symbol.high]
    return found


@cache
def known(pattern):
    found = parse(pattern)
    return found.parted(), found.covered()


def parted(pattern, pair):
    return (at(pair[0]), at(pair[1])) in known(pattern)[0]


@pytest.mark.parametrize(
    ("name", "apart", "together"),
    [
        (
            "gpt2",
            ["a ", "a.", ".\n", "1a", "a1", "中 ", "中，", "a'"],
            ["ab", " a", "12", "中の", "  ", "..", "\na"],
        ),
        ("llama3", ["a ", "a\n", ". ", "1a", "1.", "中，", "a'"], [".\n", "ab", "'s", "，中", "\n\n", "\na"]),
        ("cl100k", ["a ", "a\n", ". ", "1a", "1.", "中，", "a'"], [".\n", "ab", "'s", "，中"]),
        ("o200k", ["a ", "a\n", ". ", "1a", "1."], ["a'", ".\n", "./", "AB", "Ab"]),
        ("deepseek", ["a ", "a\n", ". ", "中，", "，中"], [".a", "ab", ".\n"]),
    ],
)
def test_what_known_patterns_keep_together(name, apart, together):
    assert [pair for pair in apart if not parted(PATTERNS[name], pair)] == []
    # White space is never left of a cut either: a look-ahead may come after it.
    assert [pair for pair in together if parted(PATTERNS[name], pair)] == []


@pytest.mark.parametrize(
    "pattern", [*PATTERNS.values(), r"\p{N}{1,3}", r"\p{N}", "[一-龥぀-ゟ゠-ヿ]+", r"(a|b-?)+c{2}"]
)
@given(
    st.lists(
        st.sampled_from([*" \n'.,!<aAsStTdl019_-/中の。，Жя", "\u0301", "'s", "\r\n", "abc"]), max_size=12
    ).map("".join)
)
def test_no_word_holds_a_pair_that_is_parted(pattern, text):
    pairs, covered = known(pattern)
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    words = split.pre_tokenize_str(text)
    for word, _ in words:
        for one, other in itertools.pairwise(word):
            if one in SYMBOL_CHARS and other in SYMBOL_CHARS:
                assert (at(one), at(other)) not in pairs
    taken = {place for _, (begin, end) in words for place in range(begin, end)}
    for place, char in enumerate(text):
        if char in SYMBOL_CHARS and at(char) in covered:
            assert place in taken


SYMBOL_CHARS = {
    char
    for char in {chr(code) for code in range(0x20, 0x7F)} | set("\n中の。，Жя")
    if any(symbol.low <= ord(char) <= symbol.high for symbol in SYMBOLS)
}


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<=a)b",
        r"a\b",
        r"^a",
        r"a$",
        r"a|",
        r"a*",
        r"(a)\1",
        r"[a[b]]",
        r"[a&&b]",
        r"\p{Han}+",
        r"\h+",
        r"(?!a)b",
        r"a(?!bc)",
        r"(?>a)",
        r"(?i)a",
        r"(?i:[^a])",
        r"a{,3}",
        r"a{0}",
        r"[z\s-a]",
        r"a.b",
        r"(a",
        r"a)",
        r"[a",
        r"[]",
        r"\p{L",
        r"\pL",
        "a\\",
        r"[a-\s]",
        r"+a",
        r"(?i:é+)|\p{L}",
        r"(?i:[а-я]+)|\p{L}",
        r"(?i:ß)|\p{L}",
        r"(?i:[\p{Lu}]+)|\p{L}",
    ],
)
def test_what_is_not_understood_is_refused(pattern):
    with pytest.raises(PatternError):
        parse(pattern)


@pytest.mark.parametrize(
    ("pattern", "together"),
    [
        (r"a?b", {"ab"}),
        (r"(?:a|b)+", {"aa", "ab", "ba", "bb"}),
        (r"ab*?c", {"ab", "bb", "bc", "ac"}),
        (r"a{2,3}b", {"aa", "ab"}),
        (r"a{1}b", {"ab"}),
        (r"[^\W\d_a-z]b", {f"{char}b" for char in "ABK"}),
        (r"(?i:k)b", {"kb", "Kb"}),
        (r"[a\-b]c", {"ac", "-c", "bc"}),
        (r"[+-]b", {"+b", "-b"}),
        (r"\P{L}b", {"1b", "-b", "+b", "_b", " b", ".b"}),
        (r"[\p{^L}]b", {"1b", "-b", "+b", "_b", " b", ".b"}),
    ],
)
def test_pairs_that_small_patterns_keep_together(pattern, together):
    source = parse(pattern)
    apart = source.parted()
    pairs = {f"{x}{y}" for x in "abckABK1-+_ ." for y in "abcAB" if (at(x), at(y)) not in apart}
    assert pairs == together


def test_a_character_that_a_class_takes_in_part_is_no_place():
    source = parse("[中a]+|b")
    assert at("中") in source.mixed
    assert not any(at("中") in pair for pair in source.parted())
    assert at("a") in source.covered()


def test_only_what_one_alternative_takes_alone_is_surely_taken():
    assert parse(r"ab?|cd").covered() == {at("a")}
    assert parse(r"a?+a|b").covered() == {at("b")}
    assert parse(r"a(?!b)|c").covered() == {at("c")}


def test_symbols_are_what_they_say():
    for symbol in SYMBOLS:
        for code in range(symbol.low, symbol.high + 1):
            char = chr(code)
            assert unicodedata.category(char) == symbol.category
            assert unicodedata.normalize("NFC", char) == char
            assert unicodedata.combining(char) == 0
    assert len({code for symbol in SYMBOLS for code in range(symbol.low, symbol.high + 1)}) == sum(
        symbol.high - symbol.low + 1 for symbol in SYMBOLS
    )


def test_normalization_joins_no_symbol_to_what_is_before_it_and_changes_no_inert_one():
    """By every canonical composition there is."""
    second, first = set(), set()
    for code in range(0x110000):
        decomposed = unicodedata.decomposition(chr(code))
        if decomposed and decomposed[0] != "<":
            parts = [int(part, 16) for part in decomposed.split()]
            if len(parts) == 2:
                first.add(parts[0])
                second.add(parts[1])
    first |= {code for code in range(0xAC00, 0xD7A4) if (code - 0xAC00) % 28 == 0}
    second |= set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
    for symbol in SYMBOLS:
        codes = set(range(symbol.low, symbol.high + 1))
        assert not codes & second
        if symbol.inert:
            assert not codes & first
