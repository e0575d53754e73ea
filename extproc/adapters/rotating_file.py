"""A file that is appended to and kept within bounds: `path`, then `path.1` (the one before), up to `path.N`.

Whoever else rotates it is respected: when the name no longer leads to the open file, it is opened anew.
"""

import contextlib
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

_LOOK_EVERY_S = 1.0


def rotate(path: Path, keep: int) -> None:
    """Move `path` to `path.1`, that to `path.2` and so on; of older ones at most `keep` remain.

    Raises:
        OSError: a file cannot be renamed or removed.
    """
    numbered = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, keep + 1))]
    numbered[-1].unlink(missing_ok=True)
    for newer, older in reversed(list(pairwise(numbered))):
        if newer.exists():
            newer.rename(older)


class RotatingFile:
    """Opened for appending; created readable by its owner and group only where it did not exist.

    Args:
        path: the file.
        max_bytes: a larger file is rotated; 0: never.
        keep: how many rotated files remain.
        clock: monotonic seconds.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(
        self, path: Path, max_bytes: int, keep: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._clock = clock
        self._open()

    def write(self, data: bytes) -> None:
        """Append `data`, whole, and hand it to the system.

        Raises:
            OSError: it could not be written, and nothing of it is there; later writes try again.
        """
        if self._file.closed or (self._clock() >= self._look_at and self._is_elsewhere()):
            self._file.close()
            self._open()
        if self._max_bytes and self._size and self._size + len(data) > self._max_bytes:
            self._file.close()
            rotate(self._path, self._keep)
            self._open()
        self._append(data)
        self._size += len(data)

    def _append(self, data: bytes) -> None:
        """What a full disk has room for is written without an error, so the beginning of it is taken back."""
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            if written:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
            raise

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._file: BinaryIO = os.fdopen(descriptor, "ab", buffering=0)
        self._size = os.fstat(descriptor).st_size
        self._look_at = self._clock() + _LOOK_EVERY_S

    def _is_elsewhere(self) -> bool:
        self._look_at = self._clock() + _LOOK_EVERY_S
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return True
        here = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)
