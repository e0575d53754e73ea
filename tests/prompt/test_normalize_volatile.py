import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.prompt.normalize_volatile import STABLE_END, move_volatile_lines

PREFIXES = ("Date:", "Trace é:")
LINES = st.sampled_from(
    [
        "Date: 1",
        "  Date: 2",
        "Trace é: 3",
        "Trace e\u0301: 4",
        "Date: </frag>",
        "Date: <frag>",
        "You are kind.",
        "",
        "  ",
        STABLE_END,
        f" {STABLE_END} ",
        f"{STABLE_END} not alone",
        "<frag>",
        "</frag>",
        "<frag>x</frag>",
    ]
)
TEXTS = st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n", "\r", "\n\n", ""])), max_size=10).map(
    lambda lines: "".join(line + end for line, end in lines)
)


def move(text, *, prefixes=PREFIXES, tag="frag", open_end=False):
    return move_volatile_lines(text, prefixes, stable_end=STABLE_END, tag=tag, open_end=open_end)


@given(TEXTS, st.sampled_from([None, "frag"]), st.booleans())
def test_moving_twice_is_moving_once(text, tag, open_end):
    once, moved = move(text, tag=tag, open_end=open_end)
    assert move(once, tag=tag, open_end=open_end) == (once, 0)
    assert (moved > 0) == (once != text)


@given(TEXTS, st.sampled_from([None, "frag"]), st.booleans())
def test_every_line_is_still_there(text, tag, open_end):
    def lines(of):
        return sorted(
            line for line in of.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip()
        )

    assert lines(move(text, tag=tag, open_end=open_end)[0]) == lines(text)


@given(st.integers(), st.integers())
def test_two_prompts_that_differ_in_a_header_share_everything_above_it(one, two):
    frame = "You are kind.\nDate: {}\nAnswer in English.\n\nA long document.".format
    first, second = move(frame(one))[0], move(frame(two))[0]
    stable = "You are kind.\nAnswer in English.\n\nA long document.\nDate: "
    assert (first, second) == (f"{stable}{one}", f"{stable}{two}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Date: 1\n\nBe kind.", "Be kind.\nDate: 1"),  # the blank line set it apart
        ("\nDate: 1\nBe kind.", "\nBe kind.\nDate: 1"),
        ("Date: 1\nTrace é: 2\nBe kind.\n", "Be kind.\nDate: 1\nTrace é: 2"),
        ("Be kind.\n\nDate: 1\nmore", "Be kind.\n\nDate: 1\nmore"),  # below the header
        ("Be kind.\nDate: 1", "Be kind.\nDate: 1"),
        ("Date: 1\n", "Date: 1\n"),  # nothing stable
        (f"Date: 1\nBe kind.\n{STABLE_END}\nmore", f"Be kind.\n{STABLE_END}\nDate: 1\nmore"),
        (f"Date: 1\nBe kind.\n{STABLE_END}", f"Be kind.\n{STABLE_END}\nDate: 1"),
        (f"Be kind.\n{STABLE_END}\nDate: 1\nmore", f"Be kind.\n{STABLE_END}\nDate: 1\nmore"),
        ("Be kind. <frag>\nDate: 1\n</frag>", "Be kind. <frag>\nDate: 1\n</frag>"),
        (
            f"Date: 1\n<frag>\n{STABLE_END}\n</frag>\n{STABLE_END}\nend",
            f"<frag>\n{STABLE_END}\n</frag>\n{STABLE_END}\nDate: 1\nend",
        ),
    ],
)
def test_where_lines_go(text, expected):
    assert move(text)[0] == expected


def test_where_something_follows_only_a_mark_says_where_the_stable_part_ends():
    assert move("Date: 1\nText. Answer:", open_end=True) == ("Date: 1\nText. Answer:", 0)
    marked = f"Date: 1\nText.\n{STABLE_END}\nAnswer:"
    assert move(marked, open_end=True) == (f"Text.\n{STABLE_END}\nDate: 1\nAnswer:", 1)


def test_many_marks_cost_their_length():
    text = f"Date: 1\n{STABLE_END} x " + f"<frag>{STABLE_END}</frag>" * 50_000
    assert move(text)[1] == 1
