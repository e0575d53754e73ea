"""The order of retrieved fragments inside a prompt text, made independent of the order they came in.

A fragment is what stands between `<TAG>` and `</TAG>`, marks included; the opening mark may have attributes
on its one line. Neighbours with only white space between them form a run, and a run is sorted by

1. `rank="N"`, a decimal number, lowest first; fragments without one go last. Whoever needs an order of
   relevance declares it here; it then survives.
2. `id="..."`, by code points.
3. the fragment's own text, by code points: the tie-break, so that the result depends on nothing else.

White space between the places of a run stays where it is. Marks that do not pair up (an opening mark inside a
fragment, or one that is never closed) leave the whole text as it is.
"""

import math
import re
from functools import lru_cache
from typing import NamedTuple

# A following U+0338 would fuse with the mark's last character under NFC: that is no mark.
_NOT_FUSED = r"(?!\u0338)"
_RANK = re.compile(r"""(?<=[ \t])rank="([0-9]{1,9}(?:\.[0-9]{1,9})?)\"""")
_ID = re.compile(r"""(?<=[ \t])id="([^"]*)\"""")


class Marks(NamedTuple):
    """Patterns of one tag."""

    opening: re.Pattern[str]
    either: re.Pattern[str]
    closing: str


@lru_cache(maxsize=256)
def marks(tag: str) -> Marks:
    """Patterns for the marks of `tag`, a plain name."""
    opening = rf"<{re.escape(tag)}(?:[ \t][^<>\r\n]*+)?(?<!/)>{_NOT_FUSED}"
    closing = f"</{tag}>"
    return Marks(re.compile(opening), re.compile(f"({opening})|{re.escape(closing)}{_NOT_FUSED}"), closing)


def find_fragments(text: str, tag: str) -> list[tuple[int, int]] | None:
    """(start, end) of each fragment, in order; None when the marks do not pair up."""
    found: list[tuple[int, int]] = []
    start: int | None = None
    if f"<{tag}" not in text:
        return found
    for match in marks(tag).either.finditer(text):
        if match[1] is not None:
            if start is not None:
                return None
            start = match.start()
        elif start is not None:
            found.append((start, match.end()))
            start = None
    return None if start is not None else found


def sort_fragments(text: str, tag: str) -> tuple[str, int]:
    """The text with its runs of fragments sorted, and how many fragments changed their place."""
    moved = 0
    pieces: list[str] = []
    done = 0
    for run in _runs(text, find_fragments(text, tag) or []):
        fragments = [text[start:end] for start, end in run]
        ordered = sorted(fragments, key=lambda fragment: _key(fragment, tag))
        moved += sum(old != new for old, new in zip(fragments, ordered, strict=True))
        for (start, end), fragment in zip(run, ordered, strict=True):
            pieces += (text[done:start], fragment)
            done = end
    if not moved:
        return text, 0
    pieces.append(text[done:])
    return "".join(pieces), moved


def _runs(text: str, found: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    runs: list[list[tuple[int, int]]] = []
    for start, end in found:
        if runs and not text[runs[-1][-1][1] : start].strip():
            runs[-1].append((start, end))
        else:
            runs.append([(start, end)])
    return runs


def _key(fragment: str, tag: str) -> tuple[float, str, str]:
    match = marks(tag).opening.match(fragment)
    attributes = "" if match is None else match[0]
    rank, name = _RANK.search(attributes), _ID.search(attributes)
    return math.inf if rank is None else float(rank[1]), "" if name is None else name[1], fragment
