"""Which characters a pre-tokenizer's pattern can never keep together, read from the pattern itself.

A pattern is parsed into positions, one for each character it may take, and the relation "may come right
after" between them (Glushkov's construction). Two characters that no related positions take can stand next to
each other in no match, not even in an attempt at one: wherever they meet, a match ends. That holds whatever
surrounds them, so it can be used without knowing where matches begin.

What is not understood (look-behind, anchors, nested classes, back-references, scripts) is refused as a whole.
"""

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Symbol:
    """Characters `low` to `high`, all of one general category. A pattern treats them alike, or not surely."""

    low: int
    high: int
    category: str

    @property
    def inert(self) -> bool:
        """Whether NFC leaves it alone even before a combining mark."""
        return (self.category[0] != "L" and chr(self.low) not in "<=>") or self.low == _IDEOGRAPHS

    def __str__(self) -> str:
        return "".join(f"\\U{code:08x}" + mark for code, mark in ((self.low, "-"), (self.high, "")))


def _letters(category: str, *ranges: tuple[int, int]) -> list[Symbol]:
    return [Symbol(low, high, category) for low, high in ranges]


_IDEOGRAPHS = 0x4E00
SYMBOLS: tuple[Symbol, ...] = (
    # Other control characters count as white space in one regex engine and not in another.
    *(Symbol(code, code, unicodedata.category(chr(code))) for code in (0x0A, *range(0x20, 0x7F))),
    *_letters("Ll", (0xE0, 0xF6), (0xF8, 0xFF), (0x3B1, 0x3C9), (0x430, 0x44F)),
    *_letters("Lu", (0xC0, 0xD6), (0x391, 0x3A1), (0x410, 0x42F)),
    *_letters("Lo", (0x5D0, 0x5EA), (0x621, 0x63F), (0x641, 0x64A), (0x904, 0x939), (0xE01, 0xE30)),
    *_letters("Lo", (0x3041, 0x3096), (0x30A1, 0x30FA), (_IDEOGRAPHS, 0x9FA5), (0xAC00, 0xD7A3)),
    *_letters("Po", (0x3001, 0x3002), (0xFF01, 0xFF01), (0xFF0C, 0xFF0C), (0xFF1F, 0xFF1F)),
)
"""What may be beside a cut. NFC leaves it as it is, unless a combining mark follows; none is such a mark."""

_SPACE = frozenset({0x0A, 0x20})
_CATEGORIES = frozenset(
    major + minor
    for major, minors in (("C", "cfnos"), ("L", "lmotu"), ("M", "cen"), ("N", "dlo"), ("P", "cdefios"))
    for minor in ("", *minors)
) | {"S", "Sc", "Sk", "Sm", "So", "Z", "Zl", "Zp", "Zs"}
_CASES = frozenset({"Lu", "Ll", "Lt"})
_CONTROLS = {"r": "\r", "n": "\n", "t": "\t", "f": "\f"}

# Whether a symbol is taken: wholly, not at all, or in part (None).
_Test = Callable[[Symbol], bool | None]


class PatternError(ValueError):
    """A pattern that is not understood."""


@dataclass(slots=True)
class _Part:
    """A piece of a pattern: positions it may begin and end with, whether it may be empty.

    `looks`: it looks ahead somewhere. `stubborn`: it holds a quantifier that gives nothing back.
    """

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    empty: bool = True
    looks: bool = False
    stubborn: bool = False
    inner: frozenset[int] = frozenset()


@dataclass(slots=True)
class SplitPattern:
    """A pattern as positions. Made by `parse`."""

    takes: list[frozenset[int]] = field(default_factory=list)  # indices of SYMBOLS, by position
    follows: set[tuple[int, int]] = field(default_factory=set)
    looks_after: set[int] = field(default_factory=set)  # positions that a look-ahead may come after
    mixed: set[int] = field(default_factory=set)  # symbols of which a position takes a part
    alternatives: list[_Part] = field(default_factory=list)

    def parted(self) -> set[tuple[int, int]]:
        """Pairs of symbols that never stand together in a match.

        What a look-ahead may come after is no first of a pair: cut off there, it would see the end.
        """
        together = {(x, y) for i, j in self.follows for x in self.takes[i] for y in self.takes[j]}
        watched = {x for i in self.looks_after for x in self.takes[i]}
        left = [x for x in range(len(SYMBOLS)) if x not in self.mixed and x not in watched]
        right = [y for y in range(len(SYMBOLS)) if y not in self.mixed]
        return {(x, y) for x in left for y in right if (x, y) not in together}

    def covered(self) -> set[int]:
        """Symbols that are always in some match: one alternative takes them alone."""
        found: set[int] = set()
        for part in self.alternatives:
            if part.looks:
                continue
            for i in part.first & part.last:
                others = part.inner - {i} if part.stubborn else frozenset()
                found |= self.takes[i].difference(*(self.takes[j] for j in others))
        return found - self.mixed


def parse(source: str) -> SplitPattern:
    """Read a pattern in the syntax of tokenizers' `Regex`.

    Raises:
        PatternError: it holds something that is not understood, or can match nothing at all.
    """
    return _Parser(source).parse()


class _Parser:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._any_case = False
        self._out = SplitPattern()

    def parse(self) -> SplitPattern:
        self._out.alternatives = self._alternatives()
        if self._at != len(self._source):
            self._refuse()
        if any(part.empty for part in self._out.alternatives):
            raise PatternError("it matches nothing at all")
        return self._out

    def _refuse(self) -> NoReturn:
        raise PatternError(f"not understood at {self._at}: {self._source[self._at : self._at + 10]!r}")

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            self._refuse()
        self._at += 1
        return char

    def _skip(self, text: str) -> bool:
        found = self._source.startswith(text, self._at)
        self._at += len(text) * found
        return found

    # --- structure -----------------------------------------------------------------------------------

    def _alternatives(self) -> list[_Part]:
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        return parts

    def _sequence(self) -> _Part:
        whole = _Part()
        while self._peek() not in ("", "|", ")"):
            if self._source.startswith(("(?!", "(?="), self._at):
                self._look_ahead(whole)
            else:
                whole = self._joined(whole, self._repeated(self._atom()))
        return whole

    def _look_ahead(self, before: _Part) -> None:
        self._at += 3
        self._item()
        if before.empty or not self._skip(")"):
            self._refuse()
        self._out.looks_after |= before.last
        before.looks = True

    def _joined(self, one: _Part, other: _Part) -> _Part:
        self._out.follows |= {(i, j) for i in one.last for j in other.first}
        return _Part(
            first=one.first | other.first if one.empty else one.first,
            last=one.last | other.last if other.empty else other.last,
            empty=one.empty and other.empty,
            looks=one.looks or other.looks,
            stubborn=one.stubborn or other.stubborn,
            inner=one.inner | other.inner,
        )

    def _repeated(self, part: _Part) -> _Part:
        mark = self._peek()
        if mark not in ("?", "*", "+", "{"):
            return part
        self._at += 1
        if mark == "{":
            low, high = self._bounds()
            part.empty = part.empty or low == 0
            again = high != 1
        else:
            part.empty = part.empty or mark in "?*"
            again = mark in "*+"
        if again:
            self._out.follows |= {(i, j) for i in part.last for j in part.first}
        if self._skip("+"):
            part.stubborn = True
        else:
            self._skip("?")
        return part

    def _bounds(self) -> tuple[int, int | None]:
        inside, closed, _ = self._source[self._at :].partition("}")
        low, comma, high = inside.partition(",")
        if not (closed and low.isascii() and low.isdigit() and (not high or high.isdigit())):
            self._refuse()
        self._at += len(inside) + 1
        most = int(low) if not comma else int(high) if high else None
        if most == 0:
            self._refuse()
        return int(low), most

    def _atom(self) -> _Part:
        if self._peek() != "(":
            return self._position(self._item())
        self._at += 1
        before = self._any_case
        if self._skip("?"):
            self._any_case = before or self._skip("i")
            if not self._skip(":"):
                self._refuse()
        parts = self._alternatives()
        if not self._skip(")"):
            self._refuse()
        self._any_case = before
        return _Part(
            first=frozenset().union(*(part.first for part in parts)),
            last=frozenset().union(*(part.last for part in parts)),
            empty=any(part.empty for part in parts),
            looks=any(part.looks for part in parts),
            stubborn=any(part.stubborn for part in parts),
            inner=frozenset().union(*(part.inner for part in parts)),
        )

    def _position(self, test: _Test) -> _Part:
        found = [test(symbol) for symbol in SYMBOLS]
        self._out.mixed |= {at for at, one in enumerate(found) if one is None}
        self._out.takes.append(frozenset(at for at, one in enumerate(found) if one is not False))
        here = frozenset({len(self._out.takes) - 1})
        return _Part(first=here, last=here, empty=False, inner=here)

    # --- characters ----------------------------------------------------------------------------------

    def _item(self) -> _Test:
        char = self._next()
        if char == "[":
            return self._class()
        if char == "\\":
            return self._escape()
        if char in ".^$()?*+{":
            self._at -= 1
            self._refuse()
        return self._between(char, char)

    def _class(self) -> _Test:
        negated = self._skip("^")
        if negated and self._any_case:
            self._refuse()
        tests: list[_Test] = []
        while not self._skip("]"):
            if self._peek() == "[" or self._source.startswith("&&", self._at):
                self._refuse()
            begin = self._at
            test = self._escape() if self._skip("\\") else None
            low = self._char_since(begin)
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                begin = self._at
                if self._peek() == "[" or low is None:
                    self._refuse()
                if self._skip("\\"):
                    self._escape()
                high = self._char_since(begin)
                if high is None:
                    self._refuse()
                tests.append(self._between(low, high))
            else:
                tests.append(self._between(low, low) if low is not None else test or self._refuse())
        if not tests:
            self._refuse()
        return lambda symbol: _negated(_any(test(symbol) for test in tests), negated)

    def _char_since(self, begin: int) -> str | None:
        """The one character read since `begin`, reading it unless it was an escape; None for a set."""
        if self._at == begin:
            return self._next()
        escaped = self._source[begin + 1 : self._at]
        if len(escaped) != 1:
            return None
        return _CONTROLS.get(escaped) or (None if escaped.isalnum() else escaped)

    def _escape(self) -> _Test:
        char = self._next()
        if char in "pP":
            return self._property(negated=char == "P")
        if char.lower() in "sdw":
            return _shorthand(char)
        if char.isalnum() and char not in _CONTROLS:
            self._refuse()
        char = _CONTROLS.get(char, char)
        return self._between(char, char)

    def _property(self, *, negated: bool) -> _Test:
        if not self._skip("{"):
            self._refuse()
        negated ^= self._skip("^")
        name, closed, _ = self._source[self._at :].partition("}")
        if not closed or name not in _CATEGORIES or (self._any_case and name in _CASES):
            self._refuse()
        self._at += len(name) + 1
        return lambda symbol: symbol.category.startswith(name) != negated

    def _between(self, low: str, high: str) -> _Test:
        exact = _range(ord(low), ord(high))
        if not self._any_case:
            return exact
        if not (low + high).isascii():
            self._refuse()  # its other cases may be anywhere, and several letters
        return lambda symbol: _any(
            exact(Symbol(code, code, "")) if symbol.low == symbol.high else exact(symbol)
            for code in {symbol.low, *map(ord, chr(symbol.low).swapcase()[:1])}
        )


def _range(low: int, high: int) -> _Test:
    def test(symbol: Symbol) -> bool | None:
        if symbol.high < low or high < symbol.low:
            return False
        return True if low <= symbol.low and symbol.high <= high else None

    return test


def _shorthand(char: str) -> _Test:
    def test(symbol: Symbol) -> bool:
        if char in "sS":
            taken = symbol.low in _SPACE
        elif char in "dD":
            taken = symbol.category == "Nd"
        else:
            taken = symbol.category[0] in "LN" or symbol.low == ord("_")
        return taken != char.isupper()

    return test


def _any(found: Iterable[bool | None]) -> bool | None:
    seen = list(found)
    return True if True in seen else None if None in seen else False


def _negated(found: bool | None, negated: bool) -> bool | None:
    return found if found is None or not negated else not found
