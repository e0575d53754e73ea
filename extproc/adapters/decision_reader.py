"""Finds lines in decision logs: plain or gzipped, with the files that rotation has left."""

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from extproc.core.errors import WarmrouteError


class DecisionLogError(WarmrouteError):
    """A decision log cannot be read; the message says why."""


class Found(NamedTuple):
    """The last line about a request, where it is, and how many lines of that file are about it."""

    line: dict[str, Any]
    where: str
    lines: int


def find_decision(path: str, request_id: str) -> Found | None:
    """Look in `path` (`-`: standard input), then in what it was rotated to, newest first.

    Raises:
        DecisionLogError: none of the files can be read.
    """
    files = [path] if path == "-" else [str(file) for file in _rotated(Path(path))]
    for name in files:
        found = _last(name, request_id)
        if found is not None:
            return found
    return None


def _rotated(path: Path) -> list[Path]:
    """`path` and its rotated files, newest first."""
    older = []
    for file in path.parent.glob(f"{path.name}.*"):
        number = file.name.removeprefix(f"{path.name}.").removesuffix(".gz")
        if number.isdecimal():
            older.append((int(number), file))
    return [path, *(file for _, file in sorted(older))]


def _last(name: str, request_id: str) -> Found | None:
    needle = json.dumps(request_id, ensure_ascii=False).encode()
    found, count = None, 0
    with _opened(name) as file:
        for raw in _lines(name, file):
            # Cheap first: most lines of a large log are about something else.
            if needle not in raw:
                continue
            try:
                line = msgspec.json.decode(raw, type=dict[str, Any])
            except msgspec.DecodeError:
                continue  # torn, or somebody else's line
            if line.get("request_id") == request_id:
                found, count = line, count + 1
    return None if found is None else Found(found, name, count)


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        with cast("BinaryIO", gzip.open(name)) if name.endswith(".gz") else Path(name).open("rb") as file:
            yield file
    except OSError as error:
        raise DecisionLogError(f"cannot read {name}: {error.strerror or error}") from error


def _lines(name: str, file: BinaryIO) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError) as error:
        raise DecisionLogError(f"cannot read {name}: {error}") from error
