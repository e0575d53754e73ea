"""What kind of text stands where two otherwise equal prompts part, and what to do about each kind."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What breaks a prefix."""

    TIMESTAMP = "timestamp"
    DATE = "date"
    UUID = "uuid"
    IDENTIFIER = "identifier"
    USER = "user name"
    COUNTER = "counter"
    FRAGMENT_ORDER = "fragment order"
    KEY_ORDER = "key order"
    WHITESPACE = "white space"
    UNICODE = "unicode form"
    TEXT = "other text"


ADVICE = {
    Kind.TIMESTAMP: "put the time behind everything that stays the same, or give only the date, or leave it "
    "out and let the model ask a tool",
    Kind.DATE: "put the date behind everything that stays the same: it breaks every prefix once a day",
    Kind.UUID: "take it out of the prompt: request and session ids belong in a header",
    Kind.IDENTIFIER: "take it out of the prompt: trace and request ids belong in a header",
    Kind.USER: "put what is about the user behind what all users share",
    Kind.COUNTER: "put the number behind what stays the same, or leave it out",
    Kind.FRAGMENT_ORDER: "give the same fragments in one fixed order, by id and not by score",
    Kind.KEY_ORDER: "write JSON with its keys in one fixed order (sort_keys)",
    Kind.WHITESPACE: "use one kind of line end, and no trailing white space, in every producer of the text",
    Kind.UNICODE: "bring text into one Unicode form (NFC) before it goes into a prompt",
    Kind.TEXT: "move the text that stays the same in front of the text that differs, where its order is free",
}

_MONTH = (
    r"\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DAY = r"\b(?:Mon|Tue(?:s)?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm]\b)?(?:\s?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_DATE = (
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}"
    rf"|(?:{_DAY},?\s+)?(?:{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}|\d{{1,2}}\.?\s+{_MONTH}\s+\d{{4}})"
)
# Never across a line end: chat templates write `user` on a line of its own.
_NAMED = (
    r"\b(?:(?i:user(?:[ _-]?(?:name|id))?|name|customer|client|employee|on behalf of)[\"']?[ \t]*"
    r"(?:[:=]|is\b|called\b|named\b)[ \t]*[\"']?(?P<value>[\w.-]{1,40}(?:[ ][A-Z][\w'.-]*){0,3})"
    r"|(?i:hello|hi|dear|speaking with|talking to|assisting|helping),?[ ]"
    r"(?P<greeted>[A-Z][\w'.-]*(?:[ ][A-Z][\w'.-]*){0,3}))"
)
# In order: what comes first wins where several match at one place.
_PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (Kind.UUID, re.compile(r"\b[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")),
    (
        Kind.TIMESTAMP,
        re.compile(
            rf"(?:{_DATE})(?:T|,?\s+(?:at\s+)?){_CLOCK}|\b{_CLOCK}\b|\b1[5-9]\d{{8}}(?:\d{{3}}|\d{{6}}|\d{{9}})?\b"
        ),
    ),
    (Kind.DATE, re.compile(rf"\b(?:{_DATE}|{_DAY})\b")),
    (
        Kind.IDENTIFIER,
        re.compile(
            r"\b00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\b"
            r"|\b(?:0x)?(?=[0-9a-f]*\d)[0-9a-f]{12,}\b|\b(?:0x)?(?=[0-9A-F]*\d)[0-9A-F]{12,}\b"
            r"|\b(?:[A-Za-z]{1,12}[_-])?(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{10,}\b"
        ),
    ),
    (Kind.USER, re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b")),
    (Kind.USER, re.compile(_NAMED)),
    (Kind.COUNTER, re.compile(r"\b\d[\d,._]*\b")),
)
_STRAY = 12  # characters of a gap that may lie outside the values found in it


@dataclass(frozen=True, slots=True)
class Value:
    """A volatile value at `start:stop` of a text."""

    kind: Kind
    start: int
    stop: int


def values(text: str) -> list[Value]:
    """The values in a text, by place; where they overlap, the kind that is listed first."""
    found: list[Value] = []
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            start, stop = match.span(match.lastgroup or 0)
            if all(stop <= other.start or start >= other.stop for other in found):
                found.append(Value(kind, start, stop))
    return sorted(found, key=lambda value: value.start)


def value_at(text: str, start: int, stop: int) -> Value | None:
    """The first value that `start:stop` lies in or consists of, but for a few characters."""
    touching = [value for value in values(text) if value.start < max(stop, start + 1) and value.stop > start]
    if not touching:
        return None
    inside = sum(min(value.stop, stop) - max(value.start, start) for value in touching)
    return touching[0] if (stop - start) - inside <= _STRAY else None


def equivalence(one: str, other: str) -> Kind | None:
    """How two different texts say the same: in other white space, Unicode form or order of words."""
    if _squeezed(one) == _squeezed(other):
        return Kind.WHITESPACE
    if _squeezed(unicodedata.normalize("NFKC", one)) == _squeezed(unicodedata.normalize("NFKC", other)):
        return Kind.UNICODE
    words, others = Counter(re.findall(r"\w+", one)), Counter(re.findall(r"\w+", other))
    if words.total() >= 4 and words == others:
        return Kind.KEY_ORDER if '":' in one or "':" in one else Kind.FRAGMENT_ORDER
    return None


def _squeezed(text: str) -> str:
    return re.sub(r"[\s\u200b\ufeff]+", "", text)


def reordered_object(one: str, at: int, other: str, other_at: int) -> tuple[int, int] | None:
    """Where JSON objects around two places end, if they are equal but for the order of their keys.

    Returns:
        The ends (after the closing brace) of the innermost such pair of objects.
    """
    ends = dict(_objects(one, at))
    if not ends:
        return None
    for start, stop in _objects(other, other_at):
        distance = other_at - start
        mine = ends.get(at - distance)
        if mine is None:
            continue
        text, other_text = one[at - distance : mine], other[start:stop]
        if text == other_text:
            continue
        try:
            if json.loads(text) == json.loads(other_text):
                return mine, stop
        except (ValueError, RecursionError):
            continue
    return None


_BRACES = 64  # opening braces looked at, those of objects that end too early included


def _objects(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Balanced objects that begin before `at` and end after it, innermost first."""
    decoder = json.JSONDecoder()
    start = text.rfind("{", 0, at)
    for _ in range(_BRACES):
        if start < 0:
            return
        try:
            _, stop = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            stop = -1
        if stop > at:
            yield start, stop
        start = text.rfind("{", 0, start)


_SPECIAL = re.compile(r"(<\|\w{1,32}\|>)")


def shape(text: str) -> str:
    """A text without what it says: letters become `a` or `A`, digits `9`, other scripts `x`.

    What looks like a special token stays.
    """
    parts = _SPECIAL.split(text)
    return "".join(part if at % 2 else "".join(map(_shape_of, part)) for at, part in enumerate(parts))


def _shape_of(character: str) -> str:
    if character.isdigit():
        return "9"
    if character.isalpha():
        if not character.isascii():
            return "x"
        return "A" if character.isupper() else "a"
    return character
