import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.json_edit import (
    Edit,
    JsonEditError,
    JsonKind,
    JsonValue,
    apply_edits,
    encode,
    parse_document,
)

SPACE = st.text(" \t\n\r", max_size=3).map(str.encode)
CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from('"\\/{}[],:\u2028\ud83d\ude00é'),
    st.just("\ud800"),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\{}[],:'), max_size=8)


@st.composite
def spelled_strings(draw: st.DrawFn, text: str | None = None) -> bytes:
    """A JSON string with each character spelled in one of the ways JSON allows."""
    content = draw(TEXT) if text is None else text
    out = b'"'
    for character in content:
        plain = json.dumps(character, ensure_ascii=False)[1:-1].encode()
        escaped = json.dumps(character)[1:-1].encode()
        hexadecimal = "".join(
            f"\\u{int.from_bytes(pair, 'big'):04X}"
            for pair in _pairs(character.encode("utf-16-be", "surrogatepass"))
        ).encode()
        out += draw(st.sampled_from([plain, escaped, hexadecimal]))
    return out + b'"'


def _pairs(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 2] for at in range(0, len(data), 2))


SCALARS = st.one_of(
    st.sampled_from(
        [b"0", b"-0", b"1e400", b"-1.50E+2", b"123456789012345678901234567890", b"true", b"false", b"null"]
    ),
    st.sampled_from([b"NaN", b"-Infinity", b'"\\ud800"', b'"\xed\xa0\x80"', b'"\\"]}"']),
    spelled_strings(),
)


@st.composite
def joined(draw: st.DrawFn, items: list[bytes], brackets: bytes) -> bytes:
    padded = [draw(SPACE) + item + draw(SPACE) for item in items]
    return brackets[:1] + (b",".join(padded) if padded else draw(SPACE)) + brackets[1:]


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    """Few different keys, so that equal ones are frequent."""
    items = []
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(["a", "key", "cache_salt", "é", '"']) | TEXT)
        key = draw(spelled_strings(name))
        items.append(key + draw(SPACE) + b":" + draw(SPACE) + draw(values))
    return draw(joined(items, b"{}"))


@st.composite
def arrays(draw: st.DrawFn, values: st.SearchStrategy[bytes]) -> bytes:
    return draw(joined(draw(st.lists(values, max_size=4)), b"[]"))


VALUES = st.recursive(SCALARS, lambda inner: objects(inner) | arrays(inner), max_leaves=20)


@st.composite
def documents(draw: st.DrawFn, values: st.SearchStrategy[bytes] = VALUES) -> bytes:
    mark = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"]))
    return mark + draw(SPACE) + draw(values) + draw(SPACE)


def places(value: JsonValue, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of every value that counts."""
    yield path
    for member in value.members():
        counts = value.get(member.key)
        assert counts is not None
        if counts.start == member.value.start:
            yield from places(member.value, (*path, member.key))
    for position, element in enumerate(value.elements()):
        yield from places(element, (*path, position))


def walk(document: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def same(left: Any, right: Any) -> bool:
    """Equality in which NaN equals NaN."""
    return repr(left) == repr(right)


@given(documents())
def test_every_place_holds_what_the_engines_parser_finds_there(body: bytes) -> None:
    root, expected = parse_document(body), json.loads(body)

    found = list(places(root))

    assert len(found) == sum(1 for _ in leaves(expected))
    for path in found:
        value = root.find(*path)
        assert value is not None
        assert same(value.decode(), walk(expected, path))
        assert value.text() == (walk(expected, path) if value.kind is JsonKind.STRING else None)


def leaves(document: Any) -> Iterator[Any]:
    yield document
    inner = (
        document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    )
    for value in inner:
        yield from leaves(value)


@given(documents(objects(VALUES)), st.sampled_from(["a", "cache_salt", "é", '"', "\ud800"]), TEXT)
def test_a_member_set_is_the_only_difference(body: bytes, key: str, new: str) -> None:
    root = parse_document(body)
    edit = root.with_member(key, new)

    changed = apply_edits(body, [edit])

    assert same(json.loads(changed), {**json.loads(body), key: new})
    assert changed[: edit.start] == body[: edit.start]
    assert changed[edit.start + len(edit.replacement) :] == body[edit.end :]


@given(documents(), st.data())
def test_several_places_change_at_once_and_nothing_else_does(body: bytes, data: st.DataObject) -> None:
    root = parse_document(body)
    strings = [path for path in places(root) if (value := root.find(*path)) and value.kind is JsonKind.STRING]
    chosen = data.draw(st.lists(st.sampled_from(strings), unique=True) if strings else st.just([]))
    edits = []
    for path in chosen:
        value = root.find(*path)
        assert value is not None
        edits.append(value.replaced_by(f"new {value.text()}"))

    changed = apply_edits(body, data.draw(st.permutations(edits)))

    after = parse_document(changed)
    expected = json.loads(body)
    for path in places(root):
        old, new = root.find(*path), after.find(*path)
        assert old is not None
        assert new is not None
        if path in chosen:
            assert new.text() == f"new {walk(expected, path)}"
        elif old.kind in (JsonKind.STRING, JsonKind.SCALAR):
            assert new.raw == old.raw
    undone = apply_edits(changed, inverse(body, edits))
    assert undone == body


def inverse(body: bytes, edits: list[Edit]) -> list[Edit]:
    out, shift = [], 0
    for edit in sorted(edits):
        start = edit.start + shift
        out.append(Edit(start, start + len(edit.replacement), body[edit.start : edit.end]))
        shift += len(edit.replacement) - (edit.end - edit.start)
    return out


def test_of_equal_keys_the_last_one_is_replaced() -> None:
    body = b'{"model": "a", "mod\\u0065l" : "b" , "x": 12345678901234567890}'

    changed = apply_edits(body, [parse_document(body).with_member("model", "c")])

    assert changed == b'{"model": "a", "mod\\u0065l" : "c" , "x": 12345678901234567890}'


def test_a_new_member_goes_behind_the_last_one() -> None:
    body = b'{ "a" : [ 1 ]\n}\n'

    assert apply_edits(body, [parse_document(body).with_member("b", "c")]) == b'{ "a" : [ 1 ],"b":"c"\n}\n'
    assert apply_edits(b"{ }", [parse_document(b"{ }").with_member("b", 1)]) == b'{"b":1 }'


def test_values_are_those_that_count_in_one_walk() -> None:
    root = parse_document(b'{"a": 1, "b": {"a": 2}, "\\u0061": [3]}')
    assert {key: value.raw for key, value in root.values().items()} == {"a": b"[3]", "b": b'{"a": 2}'}
    assert parse_document(b"[1]").values() == {}
    with pytest.raises(JsonEditError, match="no members"):
        parse_document(b"[1]").appended("a", 1)


def test_insertions_at_one_place_keep_their_order() -> None:
    assert apply_edits(b"[]", [Edit(1, 1, b"1,"), Edit(1, 1, b"2")]) == b"[1,2]"


@pytest.mark.parametrize("edits", [[Edit(0, 2, b""), Edit(1, 1, b"x")], [Edit(0, 3, b"")], [Edit(1, 0, b"")]])
def test_edits_that_contradict_each_other_are_refused(edits: list[Edit]) -> None:
    with pytest.raises(ValueError, match="overlaps or is out of bounds"):
        apply_edits(b"[]", edits)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"a',
        b'{"a":1',
        b"[1]]",
        b'{"a":1} {}',
        b'"\\',
        b"?",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-32-be"),
    ],
)
def test_what_is_no_document_in_utf8_is_refused(body: bytes) -> None:
    with pytest.raises(JsonEditError):
        parse_document(body)


@pytest.mark.parametrize("body", [b"{1:2}", b'{"a" 1}', b'{"a":}', b'{"a":1 "b":2}', b'{"\\x":1}', b"{,}"])
def test_a_broken_object_is_refused_when_it_is_walked(body: bytes) -> None:
    with pytest.raises(JsonEditError):
        parse_document(body).with_member("a", 1)


@pytest.mark.parametrize("body", [b"[1 2]", b"[,]", b"[1,]"])
def test_a_broken_array_is_refused_when_it_is_walked(body: bytes) -> None:
    with pytest.raises(JsonEditError):
        parse_document(body).elements()


def test_what_is_no_object_has_no_members() -> None:
    assert parse_document(b"[1]").members() == []
    assert parse_document(b"[1]").get("a") is None
    assert parse_document(b'{"a":1}').elements() == []
    assert parse_document(b'{"a":[1]}').find("a", 0, "b") is None
    assert parse_document(b'{"a":[1]}').find("x", 0) is None
    assert parse_document(b'{"a":[1]}').find("a", -1) is None
    with pytest.raises(JsonEditError, match="no members"):
        parse_document(b"[1]").with_member("a", 1)


def test_a_scalar_that_is_none_cannot_be_decoded() -> None:
    with pytest.raises(JsonEditError, match="not JSON"):
        parse_document(b"[bogus]").elements()[0].decode()


def test_depth_costs_no_stack() -> None:
    body = b'{"deep":' + b"[" * 100_000 + b"]" * 100_000 + b',"a":1}'

    assert apply_edits(body, [parse_document(body).with_member("a", 2)]).endswith(b',"a":2}')


def test_text_is_written_in_utf8_where_it_can_be() -> None:
    assert encode({"é": '"\u2028'}) == '{"é":"\\"\u2028"}'.encode()
    assert encode("\ud800") == b'"\\ud800"'


def test_a_walk_is_bounded_in_steps_and_members() -> None:
    with pytest.raises(JsonEditError, match="more than 262144 lists"):
        parse_document(b'{"a":[' + b"[]," * 262_150 + b"[]]}")
    with pytest.raises(JsonEditError, match=r"has no end|more than"):
        parse_document(b'{"a":' + b"[" * 300_000)
    wide = parse_document(b"{" + b",".join(b'"k%d":1' % number for number in range(5000)) + b"}")
    with pytest.raises(JsonEditError, match="more than 4096 members"):
        wide.get("k1")
    assert parse_document(b'{"a":[' + b"1," * 1_000_000 + b'1],"b":2}').get("b") is not None
