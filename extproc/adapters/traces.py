"""Reads traces of requests, plain or gzipped, a line at a time."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from extproc.core.errors import WarmrouteError


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file; one that ends in `.gz` is unpacked on the way.

    Raises:
        WarmrouteError: it cannot be read.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as packed:
                yield from packed
        else:
            with path.open(encoding="utf-8") as plain:
                yield from plain
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise WarmrouteError(f"cannot read the trace {path}: {error}") from error


def part_of(text: str) -> tuple[int, int]:
    """`i/n` as (i, n): part i, from 0, of n.

    Raises:
        WarmrouteError: it is not of that form, or there is no such part.
    """
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()) or not int(index) < int(count):
        raise WarmrouteError(f"part is {text!r}; it must be i/n with i from 0 to n - 1, such as 0/3")
    return int(index), int(count)


def window_of(text: str) -> tuple[float, float]:
    """`from:to` in seconds.

    Raises:
        WarmrouteError: it is not of that form, or the window is empty.
    """
    try:
        begin, end = map(float, text.split(":"))
    except ValueError as error:
        raise WarmrouteError(f"window is {text!r}; it must be from:to in seconds, such as 0:600") from error
    if not 0 <= begin < end:
        raise WarmrouteError(
            f"window is {text!r}; it must begin at 0 or later and end after that, as in 0:600"
        )
    return begin, end
