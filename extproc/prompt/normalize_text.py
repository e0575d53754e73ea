"""Prompt texts that differ only in how they are written, made equal.

Each rule is idempotent, keeps what the rules before it made, and depends on nothing but the text:

1. line ends: CRLF and CR become LF;
2. Unicode form: NFC, canonical composition. Never a compatibility form, which would change digits (a
   superscript two is not a two);
3. trailing spaces and tabs of lines, and of the text unless something follows it directly;
4. the order of fragments (`normalize_fragments`);
5. volatile header lines (`normalize_volatile`).
"""

import operator
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from extproc.prompt.normalize_fragments import sort_fragments
from extproc.prompt.normalize_volatile import STABLE_END, move_volatile_lines


class Rule(StrEnum):
    """What was changed: names in the decision log, metrics and reports. Comments say what is counted."""

    LINE_ENDS = "line-ends"  # line ends
    UNICODE = "unicode"  # texts
    TRAILING_SPACES = "trailing-spaces"  # lines
    FRAGMENT_ORDER = "fragment-order"  # fragments that changed their place
    VOLATILE_LINES = "volatile-lines"  # lines
    KEY_ORDER = "key-order"  # JSON objects


Counts = Counter[Rule]
"""Changes by rule; a rule that changed nothing is not in it."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """Which rules apply. `fragment_tag` None: no fragments; `volatile_lines`: how such lines begin."""

    line_ends: bool = True
    unicode: bool = True
    trailing_spaces: bool = True
    fragment_tag: str | None = None
    volatile_lines: tuple[str, ...] = ()
    stable_end: str = STABLE_END

    def plain(self) -> "TextRules":
        """The rules for texts that are no prompt of their own, such as a tool's description."""
        return TextRules(self.line_ends, self.unicode, self.trailing_spaces)


_LINE_END = re.compile(r"\r\n?")
_BLANKS = " \t"
_BEFORE_END = tuple(blank + end for blank in _BLANKS for end in "\r\n")
# Where a CR is a line end. From the first blank of a run only, so that a long run costs its length. Blanks
# between a CR and an LF stay: without them the two would be one line end.
_TRAILING = re.compile(r"(?<![ \t\r])[ \t]++(?=[\r\n]|\Z)")
_TRAILING_INSIDE = re.compile(r"(?<![ \t\r])[ \t]++(?=[\r\n])")


def normalize_text(
    text: str, rules: TextRules, counts: Counts, *, has_header: bool = True, open_end: bool = False
) -> str:
    """One text, normalized. Adds what was changed to `counts`.

    Args:
        text: as decoded; lone surrogates are let be.
        rules: which apply.
        counts: added to.
        has_header: the text begins a message, so its first lines may be a header.
        open_end: something follows the text directly: its end is not the end of a line.
    """
    if rules.line_ends and "\r" in text:
        text, changed = _LINE_END.subn("\n", text)
        _count(counts, Rule.LINE_ENDS, changed)
    if rules.unicode and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
        counts[Rule.UNICODE] += 1
    if rules.trailing_spaces:
        text, changed = _without_trailing(text, open_end=open_end)
        _count(counts, Rule.TRAILING_SPACES, changed)
    if rules.fragment_tag is not None:
        text, changed = sort_fragments(text, rules.fragment_tag)
        _count(counts, Rule.FRAGMENT_ORDER, changed)
    if rules.volatile_lines and has_header:
        text, changed = move_volatile_lines(
            text,
            rules.volatile_lines,
            stable_end=rules.stable_end,
            tag=rules.fragment_tag,
            open_end=open_end,
        )
        _count(counts, Rule.VOLATILE_LINES, changed)
    return text


def _count(counts: Counts, rule: Rule, changed: int) -> None:
    if changed:
        counts[rule] += changed


def _without_trailing(text: str, *, open_end: bool) -> tuple[str, int]:
    """The text without blanks at the ends of its lines, and how many lines had some."""
    if not any(two in text for two in _BEFORE_END) and (open_end or not text.endswith((" ", "\t"))):
        return text, 0
    if "\r" in text:
        return (_TRAILING_INSIDE if open_end else _TRAILING).subn("", text)
    lines = text.split("\n")
    trimmed = [line.rstrip(_BLANKS) for line in lines]
    if open_end:
        trimmed[-1] = lines[-1]
    return "\n".join(trimmed), sum(map(operator.ne, lines, trimmed))
