"""Change values of a JSON body in place: every byte outside the changed places stays as it was.

A body is never decoded and encoded again. It is scanned: `parse_document` gives its outermost value, a
`JsonValue` knows where in the body it stands and walks to the values inside it, and an `Edit` says which
bytes are replaced by which. `apply_edits` makes all of them at once.

What a key means is what Python's `json` (the engines' parser) takes it to mean: keys are compared after
their escapes are decoded, and of equal keys the last one counts. Bodies must be UTF-8, as RFC 8259 says; a
byte order mark in front is let be. The scan is linear in the size of the containers it walks through, in
steps of whole strings, and never recursive; there are bounds on the steps.

The body must be JSON that `json.loads` accepts (the caller has parsed it). Where it is not, a walk may raise
`JsonEditError` or not notice.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from extproc.core.errors import WarmrouteError


class JsonEditError(WarmrouteError):
    """The body is no JSON that can be edited in place; the message says why, without quoting the body."""


class JsonKind(StrEnum):
    """What a JSON value is."""

    OBJECT = "object"
    ARRAY = "array"
    STRING = "string"
    SCALAR = "scalar"  # a number, true, false, null, NaN, Infinity


Step: TypeAlias = str | int
"""One step of a path: a key of an object, or a position in an array."""


class Edit(NamedTuple):
    """Replace `body[start:end]` by `replacement`. Equal bounds insert."""

    start: int
    end: int
    replacement: bytes


class Member(NamedTuple):
    """One `"key": value` of an object: the decoded key, where it stands with its quotes, and its value."""

    key: str
    key_start: int
    key_end: int
    value: "JsonValue"


_BOM = b"\xef\xbb\xbf"
_SPACES = b" \t\n\r"
_SPACE = re.compile(rb"[ \t\n\r]*+")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]++")
# In a container everything but strings and brackets can be passed over, and containers that hold no other in
# one go: most messages are such objects.
_FLAT = rb'[^{}\[\]"]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^{}\[\]"]*+)*+'
_NESTING = re.compile(
    rb"\{" + _FLAT + rb"\}|\[" + _FLAT + rb'\]|"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}"]', re.DOTALL
)
_OPENING = (b"{", b"[")
_QUOTE, _OPEN = ord('"'), (ord("{"), ord("["))
# What a step costs, anyone can make us pay: no body of a request comes near these.
_MOST_STEPS = 1 << 18
_MOST_MEMBERS = 1 << 12


@dataclass(frozen=True, slots=True)
class JsonValue:
    """One value of a body: `body[start:end]`, without the space around it."""

    body: bytes
    kind: JsonKind
    start: int
    end: int

    @property
    def raw(self) -> bytes:
        """Its bytes."""
        return self.body[self.start : self.end]

    def decode(self) -> Any:
        """What `json.loads` makes of it.

        Raises:
            JsonEditError: it is not JSON.
            RecursionError: it is nested too deeply.
        """
        try:
            return json.loads(self.raw.decode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise JsonEditError(f"not JSON at byte {self.start}") from error

    def text(self) -> str | None:
        """The decoded string; None when it is none."""
        return _decoded(self.body, self.start, self.end) if self.kind is JsonKind.STRING else None

    def members(self) -> list[Member]:
        """Members of an object in wire order, equal keys included; nothing for other kinds."""
        return list(self._members()) if self.kind is JsonKind.OBJECT else []

    def elements(self) -> list["JsonValue"]:
        """Elements of an array; nothing for other kinds."""
        return list(self._elements()) if self.kind is JsonKind.ARRAY else []

    def get(self, key: str) -> "JsonValue | None":
        """The value of the last member called `key`; None when there is none."""
        found = None
        if self.kind is JsonKind.OBJECT:
            for member in self._members():
                if member.key == key:
                    found = member.value
        return found

    def values(self) -> dict[str, "JsonValue"]:
        """Of each key of an object, the value that counts; nothing for other kinds. One walk."""
        return {member.key: member.value for member in self.members()}

    def find(self, *path: Step) -> "JsonValue | None":
        """The value at `path` below this one; None when there is none. Negative positions are none."""
        value: JsonValue | None = self
        for step in path:
            if value is None:
                return None
            if isinstance(step, str):
                value = value.get(step)
            else:
                elements = value.elements()
                value = elements[step] if 0 <= step < len(elements) else None
        return value

    def replaced_by(self, value: Any) -> Edit:
        """The edit that puts `value` in the place of this one."""
        return Edit(self.start, self.end, encode(value))

    def with_member(self, key: str, value: Any) -> Edit:
        """The edit after which `key` of this object is `value`: replaced where it counts, else appended.

        Raises:
            JsonEditError: this is no object.
        """
        if self.kind is not JsonKind.OBJECT:
            raise JsonEditError(f"{self.kind} at byte {self.start} has no members")
        found = self.get(key)
        return self.appended(key, value) if found is None else found.replaced_by(value)

    def appended(self, key: str, value: Any) -> Edit:
        """The edit that adds a member behind the last one.

        Raises:
            JsonEditError: this is no object.
        """
        if self.kind is not JsonKind.OBJECT:
            raise JsonEditError(f"{self.kind} at byte {self.start} has no members")
        end = self.end - 1
        while self.body[end - 1] in _SPACES:
            end -= 1
        new = encode(key) + b":" + encode(value)
        if end == self.start + 1:
            return Edit(end, end, new)
        return Edit(end, end, b"," + new)

    def _members(self) -> Iterator[Member]:
        body, position = self.body, _skip_space(self.body, self.start + 1)
        if body[position : position + 1] == b"}":
            return
        count = 0
        while True:
            match = _STRING.match(body, position)
            if match is None:
                raise JsonEditError(f"a key was expected at byte {position}")
            colon = _expect(body, match.end(), b":")
            value = _value_at(body, _skip_space(body, colon))
            yield Member(_decoded(body, position, match.end()), position, match.end(), value)
            count += 1
            if count > _MOST_MEMBERS:
                raise JsonEditError(f"more than {_MOST_MEMBERS} members in one object")
            position = _skip_space(body, value.end)
            if body[position : position + 1] == b"}":
                return
            position = _skip_space(body, _expect(body, position, b","))

    def _elements(self) -> Iterator["JsonValue"]:
        body, position = self.body, _skip_space(self.body, self.start + 1)
        if body[position : position + 1] == b"]":
            return
        while True:
            value = _value_at(body, position)
            yield value
            position = _skip_space(body, value.end)
            if body[position : position + 1] == b"]":
                return
            position = _skip_space(body, _expect(body, position, b","))


def parse_document(body: bytes) -> JsonValue:
    """The outermost value of a body.

    Raises:
        JsonEditError: no JSON, more than one value, or not UTF-8.
    """
    start = len(_BOM) if body.startswith(_BOM) else 0
    if b"\x00" in body[start : start + 4] or body[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise JsonEditError("the body is not UTF-8")
    value = _value_at(body, _skip_space(body, start))
    end = _skip_space(body, value.end)
    if end != len(body):
        raise JsonEditError(f"something follows the JSON value at byte {end}")
    return value


def apply_edits(body: bytes, edits: Iterable[Edit]) -> bytes:
    """The body after all `edits`, whose bounds refer to the body before any of them.

    Insertions at one place are made in the order given.

    Raises:
        ValueError: two edits overlap, or one lies outside the body.
    """
    pieces: list[bytes | memoryview] = []
    done = 0
    with memoryview(body) as view:
        for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
            if not done <= edit.start <= edit.end <= len(body):
                raise ValueError(f"edit of bytes {edit.start} to {edit.end} overlaps or is out of bounds")
            pieces += (view[done : edit.start], edit.replacement)
            done = edit.end
        pieces.append(view[done:])
        return b"".join(pieces)


def encode(value: Any) -> bytes:
    """`value` as compact JSON in UTF-8; text that UTF-8 cannot carry (lone surrogates) is escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _value_at(body: bytes, position: int) -> JsonValue:
    first = body[position : position + 1]
    if first == b'"':
        match = _STRING.match(body, position)
        kind = JsonKind.STRING
    elif first in _OPENING:
        kind = JsonKind.OBJECT if first == b"{" else JsonKind.ARRAY
        return JsonValue(body, kind, position, _container_end(body, position))
    else:
        match = _SCALAR.match(body, position)
        kind = JsonKind.SCALAR
    if match is None:
        raise JsonEditError(f"a value was expected at byte {position}")
    return JsonValue(body, kind, position, match.end())


def _container_end(body: bytes, position: int) -> int:
    depth = 0
    for step, match in enumerate(_NESTING.finditer(body, position)):
        if step > _MOST_STEPS:
            raise JsonEditError(f"more than {_MOST_STEPS} lists and objects, or texts between them")
        start, end = match.span()
        sign = body[start]
        if end - start > 1:  # a whole string or container
            if depth == 0:
                return end
        elif sign in _OPEN:
            depth += 1
        elif sign == _QUOTE:
            break
        else:
            depth -= 1
            if depth == 0:
                return end
    raise JsonEditError(f"what begins at byte {position} has no end")


def _skip_space(body: bytes, position: int) -> int:
    match = _SPACE.match(body, position)
    return position if match is None else match.end()


def _expect(body: bytes, position: int, sign: bytes) -> int:
    position = _skip_space(body, position)
    if body[position : position + 1] != sign:
        raise JsonEditError(f"{sign.decode()!r} was expected at byte {position}")
    return position + 1


def _decoded(body: bytes, start: int, end: int) -> str:
    """The string whose quotes are at `start` and before `end`."""
    inner = body[start + 1 : end - 1]
    try:
        if b"\\" not in inner:
            return inner.decode("utf-8", "surrogatepass")
        text: str = json.loads(body[start:end].decode("utf-8", "surrogatepass"), strict=False)
    except ValueError as error:
        raise JsonEditError(f"not a JSON string at byte {start}") from error
    return text
