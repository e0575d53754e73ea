"""Reads logs line by line: files or standard input, plain, gzip or zstd (told by their first bytes)."""

import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, cast

from extproc.core.errors import WarmrouteError

LONGEST_LINE = 64 * 1024 * 1024
"""Bytes. A longer line is passed over, and told of by an empty one and `LogFile.problems`."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class LogFile:
    """One log. `name` is `-` for standard input. `problems` tells what could not be read, in words.

    Args:
        name: a path, or `-`.
        stdin: what `-` means.
    """

    def __init__(self, name: str, stdin: BinaryIO | None = None) -> None:
        self.name = name
        self.problems: list[str] = []
        self._raw: IO[bytes] | None = None
        self._stdin = stdin
        self._size = 0
        if name != "-":
            try:
                self._size = Path(name).stat().st_size
                with Path(name).open("rb"):
                    pass
            except OSError as error:
                raise WarmrouteError(f"cannot read the log {name}: {error.strerror}") from None

    @property
    def size(self) -> int | None:
        """Bytes of the file as it lies there; None if that is not known."""
        return None if self.name == "-" else self._size

    @property
    def position(self) -> int:
        """Bytes of it that have been read, about."""
        if self._raw is None or self.name == "-":
            return 0
        return self._raw.tell() if not self._raw.closed else self._size

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbers, from 1, and bytes of its lines.

        A file that breaks off is read up to there.

        Raises:
            WarmrouteError: it cannot be opened, or unpacking it needs a package that is not here.
        """
        number = 0
        try:
            with self._open() as stream:
                while line := stream.readline(LONGEST_LINE):
                    number += 1
                    if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                        while (rest := stream.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                            pass
                        longest = LONGEST_LINE >> 20
                        self.problems.append(
                            f"{self.name}:{number} is longer than {longest} MiB: passed over"
                        )
                        line = b""
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            self.problems.append(f"{self.name} breaks off after line {number} ({error})")
        finally:
            if self._raw is not None and self.name != "-":  # closing what unpacks it leaves the file open
                self._raw.close()

    def _open(self) -> IO[bytes]:
        if self.name == "-":
            raw: io.BufferedReader = io.BufferedReader(cast("io.RawIOBase", self._stdin or sys.stdin.buffer))
        else:
            raw = Path(self.name).open("rb")  # noqa: SIM115 - closed with what reads it
        self._raw = raw
        start = raw.peek(4)[:4]
        if start.startswith(_GZIP):
            return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
        if start == _ZSTD:
            return self._zstd(raw)
        return raw

    def _zstd(self, raw: IO[bytes]) -> IO[bytes]:
        for module, opener in (("compression.zstd", "ZstdFile"), ("zstandard", "open")):
            try:
                found = getattr(importlib.import_module(module), opener)
            except ImportError:
                continue
            return io.BufferedReader(found(raw, "rb"))
        raw.close()
        raise WarmrouteError(
            f"{self.name} is packed with zstd, which this Python cannot read: install the package "
            f"`zstandard`, or run `zstd -dc {self.name} | warmroute analyze -`"
        )
