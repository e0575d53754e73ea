import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.analysis.volatile import ADVICE, Kind, equivalence, reordered_object, shape, value_at, values


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("now 2026-11-30T05:47:24Z.", Kind.TIMESTAMP, "2026-11-30T05:47:24Z"),
        ("now 2026-11-30 05:47:24.123+02:00", Kind.TIMESTAMP, "2026-11-30 05:47:24.123+02:00"),
        ("now Monday, November 30, 2026 at 5:47 PM", Kind.TIMESTAMP, "Monday, November 30, 2026 at 5:47 PM"),
        ("clock 05:47 now", Kind.TIMESTAMP, "05:47"),
        ("epoch 1764481644 s", Kind.TIMESTAMP, "1764481644"),
        ("epoch 1764481644123 ms", Kind.TIMESTAMP, "1764481644123"),
        ("on 2026-11-30 it", Kind.DATE, "2026-11-30"),
        ("on 30 November 2026 it", Kind.DATE, "30 November 2026"),
        ("on 30.11.2026 it", Kind.DATE, "30.11.2026"),
        ("Today is Thursday.", Kind.DATE, "Thursday"),
        ("id 123e4567-e89b-12d3-a456-426614174000;", Kind.UUID, "123e4567-e89b-12d3-a456-426614174000"),
        ("trace 4bf92f3577b34da6a3ce929d0e0e4736", Kind.IDENTIFIER, "4bf92f3577b34da6a3ce929d0e0e4736"),
        (
            "tp 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            Kind.IDENTIFIER,
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ),
        ("req_8fjK2l3m4n5o6p sent", Kind.IDENTIFIER, "req_8fjK2l3m4n5o6p"),
        ("mail ann.lee@example.org now", Kind.USER, "ann.lee@example.org"),
        ("user: Ann Lee asks", Kind.USER, "Ann Lee"),
        ("username=jdoe asks", Kind.USER, "jdoe"),
        ("You are assisting Ann Lee today", Kind.USER, "Ann Lee"),
        ("Hello Bob, welcome", Kind.USER, "Bob"),
        ("turn 17 of many", Kind.COUNTER, "17"),
    ],
)
def test_values_are_recognised(text, kind, value):
    assert [(found.kind, text[found.start : found.stop]) for found in values(text)] == [(kind, value)]


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nWhat about the thunder in march",
        "the user wants internationalization",
        "Summer Monday-ish Marble",
    ],
)
def test_ordinary_text_has_no_names_or_dates(text):
    assert [found for found in values(text) if found.kind is not Kind.DATE or "Monday" not in text] == []


def test_a_gap_within_a_value_is_that_value():
    text = "time 2026-11-30T05:47:24Z and more"
    assert value_at(text, 16, 18).start == 5
    assert value_at("a quite different sentence of 17 words", 0, 38) is None
    assert value_at("no value here", 3, 8) is None


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("a\r\nb", "a\nb", Kind.WHITESPACE),
        ("a  b ", "a b", Kind.WHITESPACE),
        ("é", "e\u0301", Kind.UNICODE),
        ("ﬁne", "fine", Kind.UNICODE),
        ('"a": 1, "bb": 2, ', '"bb": 2, "a": 1, ', Kind.KEY_ORDER),
        ("red green blue white", "white red green blue", Kind.FRAGMENT_ORDER),
        ("red", "green", None),
    ],
)
def test_texts_that_say_the_same(one, other, kind):
    assert equivalence(one, other) is kind


JSON = st.recursive(
    st.one_of(st.integers(), st.text(max_size=5), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), JSON, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_objects_in_another_key_order_are_recognised_whole(value, rng):
    keys = list(value)
    rng.shuffle(keys)
    one, other = (
        f"say {json.dumps(v, ensure_ascii=False)} end" for v in (value, {k: value[k] for k in keys})
    )
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is not None:
        ends = reordered_object(one, at, other, at)
        assert ends is not None
        assert one[ends[0] :] == other[ends[1] :]


def test_objects_that_differ_are_not_in_another_order():
    assert reordered_object('{"a": 1, "b": 2}', 2, '{"b": 2, "a": 3}', 2) is None
    assert reordered_object("no {braces", 5, "no {brackets", 5) is None


@given(st.text())
def test_a_shape_tells_nothing(text):
    said = shape(text)
    assert len(said) == len(text) or "<|" in text
    assert not any(c.isalpha() and c not in "aAx" for c in said if "<|" not in text)
    assert not any(c.isdigit() and c != "9" for c in said if "<|" not in text)


def test_special_tokens_stay_in_a_shape():
    assert shape("<|im_start|>user\nZoë 42") == "<|im_start|>aaaa\nAax 99"


def test_there_is_advice_for_every_kind():
    assert set(ADVICE) == set(Kind)
