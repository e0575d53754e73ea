"""Tool definitions that differ only in the order of keys or in how their descriptions are written.

Chat templates print a tool's JSON schema with its keys as they came, so a client that shuffles them shares no
prefix with itself. Members of every object of a tool are sorted by their decoded keys (code points); of equal
keys the last stays the last, which is the one that counts. Members move as the bytes they are: numbers keep
their digits, strings their escapes. Arrays keep their order, which has a meaning.

In a schema, text under `description` and `title` is prompt text and gets the plain text rules. Values that
are data (`default`, `const`, `enum`, `examples`) are what the model should produce: they keep their texts.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from extproc.prompt.normalize_text import Counts, Rule, TextRules, normalize_text
from extproc.protocol.json_edit import Edit, JsonKind, JsonValue, Member, encode

MAX_DEPTH = 32
"""Deeper values are let be: each level is scanned once more."""

_TEXTS = frozenset({"description", "title"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"default", "const", "enum", "examples", "example"})


class _Role(Enum):
    """What the keys of an object mean."""

    SCHEMA = auto()  # keywords; the outer levels of a tool count as this
    NAMES = auto()  # names of schemas
    DATA = auto()  # nothing we know


def tool_edits(
    tools: JsonValue,
    rules: TextRules,
    counts: Counts,
    *,
    key_order: bool,
    check: Callable[[], None] = lambda: None,
) -> list[Edit]:
    """The edits that normalize an array of tool definitions. Adds what they change to `counts`.

    `check` is called now and then; what it raises ends the work.

    Raises:
        JsonEditError: see `JsonValue`.
    """
    edits = []
    writer = _Writer(rules.plain(), counts, check, key_order=key_order)
    for tool in tools.elements():
        written = writer.write(tool, _Role.SCHEMA, MAX_DEPTH)
        if written != tool.raw:
            edits.append(Edit(tool.start, tool.end, written))
    return edits


class _Writer:
    def __init__(
        self, rules: TextRules, counts: Counts, check: Callable[[], None], *, key_order: bool
    ) -> None:
        self._rules = rules
        self._check = check
        self._counts = counts
        self._key_order = key_order

    def write(self, value: JsonValue, role: _Role, depth: int) -> bytes:
        self._check()
        if depth > 0:
            if value.kind is JsonKind.OBJECT:
                return self._object(value, role, depth)
            if value.kind is JsonKind.ARRAY:
                elements = value.elements()
                written = [self.write(element, role, depth - 1) for element in elements]
                return _spliced(value, [(e.start, e.end) for e in elements], written)
        return value.raw

    def _object(self, value: JsonValue, role: _Role, depth: int) -> bytes:
        members = value.members()
        ordered: Sequence[Member] = members
        if self._key_order:
            ordered = sorted(members, key=lambda member: member.key)
            if [m.key_start for m in ordered] != [m.key_start for m in members]:
                self._counts[Rule.KEY_ORDER] += 1
        written = [self._member(member, role, depth) for member in ordered]
        return _spliced(value, [(m.key_start, m.value.end) for m in members], written)

    def _member(self, member: Member, role: _Role, depth: int) -> bytes:
        value = member.value
        key = value.body[member.key_start : value.start]
        if role is _Role.SCHEMA and member.key in _TEXTS:
            text = value.text()
            if text is not None:
                normal = normalize_text(text, self._rules, self._counts)
                return key + (value.raw if normal == text else encode(normal))
        return key + self.write(value, _inner_role(member.key, role), depth - 1)


def _inner_role(key: str, role: _Role) -> _Role:
    if role is _Role.DATA or (role is _Role.SCHEMA and key in _DATA):
        return _Role.DATA
    return _Role.NAMES if role is _Role.SCHEMA and key in _NAMED else _Role.SCHEMA


def _spliced(value: JsonValue, places: Sequence[tuple[int, int]], written: Sequence[bytes]) -> bytes:
    """The bytes of `value` with `written` in its `places`, in order."""
    pieces: list[bytes] = []
    done = value.start
    for (start, end), piece in zip(places, written, strict=True):
        pieces += (value.body[done:start], piece)
        done = end
    pieces.append(value.body[done : value.end])
    return b"".join(pieces)
