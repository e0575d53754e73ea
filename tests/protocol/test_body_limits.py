import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.body_limits import gunzip, has_more_values

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a,[{:\\"}]é'),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='k,\\"'), inner, max_size=5),
    max_leaves=60,
)


def values_in(value):
    if isinstance(value, dict):
        return 1 + sum(map(values_in, value.values()))
    return 1 + sum(map(values_in, value)) if isinstance(value, list) else 1


@given(JSON, st.integers(0, 40), st.sampled_from([(", ", ": "), (",", ":")]))
def test_a_document_within_the_bound_passes_and_one_with_twice_as_many_values_does_not(value, most, marks):
    body = json.dumps(value, ensure_ascii=False, separators=marks).encode()
    count = values_in(value)
    if has_more_values(body, most):
        assert count > most / 2
    else:
        assert count <= 2 * most + 1


@pytest.mark.parametrize("text", ["a, b [c] {d}", 'a "quoted, \\" list" of [1, 2]', "\\\\", 'ends with \\"'])
def test_marks_inside_texts_are_no_values(text):
    body = json.dumps({"prompt": text * 2000}).encode()
    assert not has_more_values(body, 10)
    assert has_more_values(json.dumps({"prompt": [text] * 2000}).encode(), 10)


@pytest.mark.parametrize("filling", ["[],", "{},", '"",', "1,"])
def test_no_value_is_too_short_to_be_counted(filling):
    count = 1000
    body = f"[{(filling * (count - 1))[:-1]}]".encode()
    assert values_in(json.loads(body)) == count
    assert has_more_values(body, count - 2)
    assert not has_more_values(body, 2 * count)


@pytest.mark.parametrize("filling", [b"[],", b"{},", b'"",', b"1,", b'"\\\\",', b'"\\"",', b"[[[[", b'"a":{'])
def test_a_flood_of_values_is_seen_whatever_they_are(filling):
    assert has_more_values(b'{"a":[' + filling * 10_000, 1000)


def test_what_is_decompressed_is_bounded_by_length_and_by_growth():
    text = os.urandom(1000).hex().encode()
    assert gunzip(gzip.compress(text), 2000) == text
    assert gunzip(gzip.compress(text), 1999) is None
    quiet = b" " * (1 << 20)
    assert gunzip(gzip.compress(quiet), 1 << 30) == quiet  # small enough to do no harm
    assert gunzip(gzip.compress(quiet + b" "), 1 << 30) is None  # a thousand times its size
    large = os.urandom(1 << 20).hex().encode()
    assert gunzip(gzip.compress(large), 1 << 30) == large
