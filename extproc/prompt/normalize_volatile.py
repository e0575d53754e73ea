"""Header lines that change from request to request, moved behind the part that does not.

A prefix cache ends at the first difference, so a line such as `Current time: ...` on top of a prompt makes
everything below it uncacheable. Only lines that are declared, by how they begin, are moved, and only from the
header: the lines down to the first blank line below something stable, to the first fragment (see
`normalize_fragments`) or to the line that ends the stable part.

They go, in their order, behind the first line that consists of the mark `stable_end` (and is in no fragment);
without such a line to the end of the text. Where something follows the text directly (a completion's answer,
another content part) only a mark can say where the stable part ends; without one nothing is moved. Texts in
which a CR alone ends a line are let be: the rule about line ends leaves none.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from extproc.prompt.normalize_fragments import find_fragments, marks

STABLE_END = "<!-- stable-end -->"
"""Default mark of the end of the stable part: a line of its own."""

_LONE_CR = re.compile(r"\r(?!\n)")
_LINE = re.compile(r"([^\r\n]*+)(\r\n|[\r\n])?")
_BLANKS = " \t"


def move_volatile_lines(
    text: str, prefixes: Sequence[str], *, stable_end: str, tag: str | None, open_end: bool
) -> tuple[str, int]:
    """The text with its declared header lines behind the stable part, and how many lines were moved.

    Args:
        text: a prompt text.
        prefixes: how the lines begin; leading blanks of a line do not count.
        stable_end: the mark.
        tag: of fragments, whose insides are neither header nor mark; None: there are none.
        open_end: something follows the text directly.
    """
    mark = _mark_line(text, stable_end, tag)
    if (mark is None and open_end) or ("\r" in text and _LONE_CR.search(text)):
        return text, 0
    header_end = len(text) if mark is None else mark[0]
    if tag is not None and (first := marks(tag).opening.search(text, 0, header_end)) is not None:
        header_end = first.start()
    moved, kept, end = _split_header(text, header_end, prefixes, None if tag is None else marks(tag).closing)
    if not moved:
        return text, 0
    if mark is None:
        rest = kept + text[end:]
        if not rest.strip(_BLANKS + "\r\n"):
            return text, 0
        last_line_is_blank = (bare := rest.rstrip(_BLANKS)).endswith("\n")
        result = (bare if last_line_is_blank else rest + "\n") + "\n".join(moved)
    else:
        stable, below = kept + text[end : mark[1]], text[mark[1] :]
        if not stable.endswith("\n"):
            result = stable + "\n" + "\n".join(moved)
        else:
            result = stable + "".join(f"{line}\n" for line in moved) + below
    return (result, len(moved)) if result != text else (text, 0)


def _split_header(
    text: str, header_end: int, prefixes: Sequence[str], closing: str | None
) -> tuple[list[str], str, int]:
    """(volatile lines, what of the header stays, where the header ends).

    Blank lines that set volatile lines apart from the first stable one go with them.
    """
    begins = tuple(unicodedata.normalize("NFC", prefix) for prefix in prefixes)
    moved: list[str] = []
    kept: list[str] = []
    stable = False
    position = 0
    while position < header_end:
        match = _LINE.match(text, position)
        if match is None or match.end() > header_end:
            break
        line = match[1]
        if not line.strip(_BLANKS):
            if stable:
                break
            if not moved:
                kept.append(match[0])
        elif _is_volatile(line, begins, closing):
            moved.append(line)
        else:
            stable = True
            kept.append(match[0])
        position = match.end()
    return moved, "".join(kept), position


def _is_volatile(line: str, begins: tuple[str, ...], closing: str | None) -> bool:
    # A closing mark must not be carried to where it could close something.
    if closing is not None and closing in line:
        return False
    return unicodedata.normalize("NFC", line.lstrip(_BLANKS)).startswith(begins)


def _mark_line(text: str, stable_end: str, tag: str | None) -> tuple[int, int] | None:
    """(start, end) of the first line that is the mark, its line end included."""
    if stable_end not in text:
        return None
    fragments = [] if tag is None else find_fragments(text, tag) or []
    for match in _mark_pattern(stable_end).finditer(text):
        before = bisect_right(fragments, (match.start(), len(text)))
        if before == 0 or fragments[before - 1][1] <= match.start():
            return match.span()
    return None


@lru_cache(maxsize=256)
def _mark_pattern(stable_end: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![^\r\n])[ \t]*+{re.escape(stable_end)}[ \t]*+(?:\r\n|[\r\n]|\Z)")
