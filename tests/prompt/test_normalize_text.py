import unicodedata
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.prompt.normalize_text import Rule, TextRules, normalize_text
from extproc.prompt.normalize_volatile import STABLE_END

ALL = TextRules(fragment_tag="frag", volatile_lines=("Date:", "Zeit é:"))
NONE = TextRules(line_ends=False, unicode=False, trailing_spaces=False)
# Each alone; fragments stay known to the rule about header lines, which respects them.
SINGLE = {
    "line_ends": replace(NONE, line_ends=True),
    "unicode": replace(NONE, unicode=True),
    "trailing_spaces": replace(NONE, trailing_spaces=True),
    "fragments": replace(NONE, fragment_tag="frag"),
    "volatile": replace(NONE, fragment_tag="frag", volatile_lines=ALL.volatile_lines),
}
PIECES = st.sampled_from(
    [
        *("\r", "\n", "\r\n", " ", "\t", "  \n", "\n\n", "\r\n\r\n"),
        *("e\u0301", "é", "\u0301", "\u0338", "\u212a", "\u037e", "²", "①", "１", "123456789012345678901.50"),
        *('<frag id="b">', "<frag>", "</frag>", '<frag rank="1">', "<frag>é</frag>", "<frag>e\u0301</frag>"),
        *(
            "Date: 1\n",
            "Date: 2 \r\n",
            "Zeit e\u0301: 3\n",
            f"{STABLE_END}\n",
            "word",
            "\ud800",
            "\U0001f600",
        ),
    ]
)
TEXTS = st.lists(PIECES, max_size=16).map("".join) | st.text(max_size=12)


def normal(text, rules=ALL, **flags):
    return normalize_text(text, rules, Counter(), **flags)


@given(TEXTS, st.booleans(), st.booleans())
def test_it_is_idempotent(text, has_header, open_end):
    flags = {"has_header": has_header, "open_end": open_end}
    once = normal(text, **flags)
    counts = Counter()
    assert normalize_text(once, ALL, counts, **flags) == once
    assert not counts


@given(TEXTS, st.sampled_from(sorted(SINGLE)), st.booleans())
def test_a_client_that_has_applied_a_rule_already_gets_the_same(text, rule, open_end):
    before = normal(text, SINGLE[rule], open_end=open_end)
    assert normal(before, open_end=open_end) == normal(text, open_end=open_end)


@given(TEXTS, st.permutations(sorted(SINGLE)), st.booleans())
def test_the_order_in_which_rules_were_applied_before_does_not_matter(text, order, open_end):
    before = text
    for rule in order:
        before = normal(before, SINGLE[rule], open_end=open_end)
    assert normal(before, open_end=open_end) == normal(text, open_end=open_end)


@given(TEXTS)
def test_numbers_keep_their_digits(text):
    def digits(of):
        return sorted(character for character in of if unicodedata.category(character)[0] == "N")

    assert digits(normal(text)) == digits(text)


@given(TEXTS)
def test_changes_are_counted_exactly_if_there_are_any(text):
    counts = Counter()
    assert (normalize_text(text, ALL, counts) != text) == bool(counts)
    assert all(count > 0 for count in counts.values())


@given(TEXTS)
def test_without_rules_nothing_changes(text):
    assert normal(text, NONE) == text


def test_what_each_rule_does_and_counts():
    text = "Date: 1\r\nBe kind. \r\rCafe\u0301\t\n<frag>2</frag><frag>1</frag>  "
    counts = Counter()
    assert normalize_text(text, ALL, counts) == "Be kind.\n\nCafé\n<frag>1</frag><frag>2</frag>\nDate: 1"
    assert counts == {
        Rule.LINE_ENDS: 3,
        Rule.UNICODE: 1,
        Rule.TRAILING_SPACES: 3,
        Rule.FRAGMENT_ORDER: 2,
        Rule.VOLATILE_LINES: 1,
    }


@pytest.mark.parametrize(
    ("text", "closed", "open_"),
    [
        ("Answer: ", "Answer:", "Answer: "),
        ("a \nAnswer:\t", "a\nAnswer:", "a\nAnswer:\t"),
        ("  indented", "  indented", "  indented"),
        ("no-break\u00a0", "no-break\u00a0", "no-break\u00a0"),
        ("Date: 1\nText", "Text\nDate: 1", "Date: 1\nText"),
    ],
)
def test_an_end_that_something_follows_is_no_end_of_a_line(text, closed, open_):
    assert normal(text) == closed
    assert normal(text, open_end=True) == open_


def test_only_the_text_that_begins_a_message_has_a_header():
    assert normal("Date: 1\nText", has_header=False) == "Date: 1\nText"


def test_compatibility_forms_are_kept():
    assert normal("x² ① １ ﬁ") == "x² ① １ ﬁ"


def test_long_runs_cost_their_length():
    text = " " * 300_000 + "x" + "\r" * 300_000
    assert normal(text) == " " * 300_000 + "x" + "\n" * 300_000
