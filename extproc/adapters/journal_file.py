"""Journals on disk.

A journal begins with `MAGIC`, then come pieces: length (4 bytes, little-endian), then that many bytes of
zlib over a MessagePack array of entries; the first piece holds the header alone. A process that dies leaves
at most its last piece unwritten, or torn; what is whole can be replayed.

A journal must be replayed from its beginning, so it does not drop its oldest part to stay small: it ends when
it is full. Each start of the router begins a new one, and keeps some of those before (`path.1` and so on):
once it has succeeded, so that one that fails takes nothing from the router that runs, or ran before.
"""

import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from extproc.adapters.rotating_file import rotate
from extproc.journal.header import Header, JournalError
from extproc.journal.tap import Entry

MAGIC = b"warmroute-journal\n"
_PIECE_BYTES = 256 << 10
_PIECE_MAX = 64 << 20
_LEVEL = 1


class JournalFullError(Exception):
    """The journal has reached its size."""


class JournalWriter:
    """Writes one journal: in memory until `open`, then to its file.

    Args:
        path: the file; one that is there already is kept as `path.1`.
        header: how the router was built.
        max_bytes: where the journal ends.
        keep: how many earlier journals remain.
    """

    def __init__(self, path: Path, header: Header, max_bytes: int, keep: int) -> None:
        self._path = path
        self._keep = keep
        self._early = io.BytesIO()
        self._file: BinaryIO = self._early
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.bytes = self._file.write(MAGIC)
        self.write_all([header.pack()])

    def open(self) -> None:
        """Begin the file, with what was written so far.

        Raises:
            OSError: it cannot be written.
        """
        rotate(self._path, self._keep)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "wb", buffering=0)
        self._file = file
        with self._early, self._early.getbuffer() as data:
            _write_whole(file, data)

    def write(self, entry: Entry) -> None:
        """Add one entry; it reaches the file with the next `flush`, or when enough have come together.

        Raises:
            OSError: it cannot be written.
            JournalFullError: the journal is full, up to the entry before.
        """
        data = self._encoder.encode(entry)
        if self.bytes + self._waiting_bytes // 4 > self._max_bytes:
            self.flush()
            if self.bytes > self._max_bytes:
                raise JournalFullError(f"the journal has reached {self._max_bytes / 1e6:g} MB")
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= _PIECE_BYTES:
            self.flush()

    def write_all(self, entries: list[Any]) -> None:
        """Add entries as a piece of their own."""
        self._waiting = [self._encoder.encode(entry) for entry in entries]
        self.flush()

    def flush(self) -> None:
        """Hand what has come together to the system.

        Raises:
            OSError: it cannot be written.
        """
        if not self._waiting:
            return
        raw = msgspec.msgpack.encode([msgspec.Raw(data) for data in self._waiting])
        piece = zlib.compress(raw, _LEVEL)
        self._waiting, self._waiting_bytes = [], 0
        _write_whole(self._file, len(piece).to_bytes(4, "little") + piece)
        self.bytes += 4 + len(piece)

    def close(self) -> None:
        """Flush and close.

        Raises:
            OSError: it cannot be written.
        """
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without what has not been handed over."""
        self._waiting = []
        self._file.close()


def _write_whole(file: BinaryIO, data: bytes | memoryview) -> None:
    """A full disk takes as much as it has room for without an error: what came after would not be found."""
    written = 0
    while written < len(data):
        written += file.write(data[written:])


class JournalReader:
    """Reads one journal.

    Args:
        path: the file.

    Raises:
        JournalError: it cannot be read, or is no journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.torn = False
        """Whether the file ends within a piece: its writer was stopped in the middle, or is still writing."""
        pieces = self._pieces()
        first = next(pieces, None)
        if not first:
            raise JournalError(f"{path} is empty: nothing was recorded")
        self.header = Header.unpack(first[0])
        self._rest = pieces

    def entries(self) -> Iterator[Entry]:
        """All entries that are whole; only once.

        Raises:
            JournalError: the file is damaged; the entries before that have been given.
        """
        for piece in self._rest:
            yield from piece

    def _pieces(self) -> Iterator[list[Any]]:
        try:
            with self._path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise JournalError(f"{self._path} is no Warmroute journal")
                while size := file.read(4):
                    length = int.from_bytes(size, "little")
                    data = file.read(length) if length <= _PIECE_MAX else b""
                    if len(size) < 4 or len(data) < length:
                        self.torn = True
                        return
                    yield self._decoded(data)
        except OSError as error:
            raise JournalError(f"cannot read {self._path}: {error.strerror}") from error

    def _decoded(self, piece: bytes) -> list[Any]:
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(piece, _PIECE_MAX)
            if not unpacker.eof:
                raise JournalError(f"{self._path} is damaged: a piece is larger than any that is written")
            return msgspec.msgpack.decode(data, type=list[Any])
        except (zlib.error, msgspec.DecodeError) as error:
            raise JournalError(f"{self._path} is damaged: {error}") from error
