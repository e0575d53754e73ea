import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.prompt.normalize_fragments import find_fragments, sort_fragments

PIECES = st.sampled_from(
    [
        "<frag>",
        "</frag>",
        '<frag id="b">',
        '<frag id="a" rank="2">',
        '<frag rank="10">',
        "<frag/>",
        "<frag />",
        "<fragment>",
        "<frag\n>",
        "\u0338",
        "text",
        "é",
        " ",
        "\n",
        "<",
        ">",
    ]
)
MESSES = st.lists(PIECES, max_size=14).map("".join)
FRAGMENTS = st.lists(
    st.builds(
        lambda attributes, inside: f"<frag{attributes}>{inside}</frag>",
        st.sampled_from(["", ' id="a"', ' id="b"', ' rank="2"', ' rank="10" id="a"', ' id="a" rank="1.5"']),
        st.text("xyz\n é", max_size=4),
    ),
    max_size=6,
)


@given(MESSES)
def test_sorting_twice_is_sorting_once(text):
    once, _ = sort_fragments(text, "frag")
    assert sort_fragments(once, "frag") == (once, 0)


@given(MESSES)
def test_nothing_is_lost_or_invented(text):
    result, moved = sort_fragments(text, "frag")
    assert sorted(result) == sorted(text)
    assert (moved > 0) == (result != text)


@given(FRAGMENTS, st.sampled_from(["", "\n", "\n\n", " "]), st.randoms(use_true_random=False))
def test_the_order_they_came_in_does_not_matter(fragments, separator, rng):
    shuffled = rng.sample(fragments, len(fragments))
    frame = "Answer from these:\n{}\nQuestion?".format
    expected, _ = sort_fragments(frame(separator.join(fragments)), "frag")
    assert sort_fragments(frame(separator.join(shuffled)), "frag")[0] == expected


def test_rank_goes_before_name_and_name_before_text():
    expected = [
        '<doc rank="2">z</doc>',
        '<doc id="a" rank="10">z</doc>',
        '<doc rank="10" id="b">a</doc>',
        "<doc>m</doc>",
        '<doc id="a">z</doc>',
        '<doc id="b">a</doc>',
        '<doc id="b">b</doc>',
    ]
    shuffled = random.Random(1).sample(expected, len(expected))
    assert sort_fragments("\n".join(shuffled), "doc")[0] == "\n".join(expected)


def test_a_run_ends_where_something_else_stands():
    text = "<d>2</d> <d>1</d> and <d>0</d>\n<d>-</d>"
    assert sort_fragments(text, "d") == ("<d>1</d> <d>2</d> and <d>-</d>\n<d>0</d>", 4)


@pytest.mark.parametrize(
    "text",
    [
        "<d>2</d><d>1<d>0</d></d>",  # one inside another
        "<d>2</d><d>1</d><d>never closed",
        "<d2>2</d2><d2>1</d2>",  # another tag
        "<d>2</d>\u0338<d>1</d>",  # under NFC the first is no mark
        "<d>2",
        "",
    ],
)
def test_marks_that_do_not_pair_up_change_nothing(text):
    assert sort_fragments(text, "d") == (text, 0)


def test_a_closing_mark_alone_is_text():
    assert sort_fragments("a </d> b <d>2</d><d>1</d>", "d")[0] == "a </d> b <d>1</d><d>2</d>"


def test_tags_are_taken_literally():
    assert sort_fragments("<a.b>2</a.b><a.b>1</a.b>", "a.b")[1] == 2
    assert sort_fragments("<axb>2</axb><axb>1</axb>", "a.b")[1] == 0


def test_many_opening_marks_cost_their_length():
    text = "<d " * 100_000
    assert find_fragments(text, "d") == []
    many = "<d>x</d>" * 100_000
    assert len(find_fragments(many, "d")) == len(re.findall("<d>", many))
