"""A snapshot of the index on disk: for a replica that has no peer to ask when it starts again.

    line 1      warmroute-index 1 <unix time of writing>
    records     length (u32), xxh3-64 of the piece (u64), the piece; little endian
    last        length 0: without it the file was cut off

It is written beside the old one and renamed over it, so that there is always a whole one.
"""

import contextlib
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest

from extproc.core.errors import WarmrouteError
from extproc.protocol.index_snapshot import MAX_PIECE_BYTES

_MAGIC = b"warmroute-index 1 "
_RECORD = struct.Struct("<IQ")


class IndexFileError(WarmrouteError):
    """The snapshot cannot be used; the message says why."""


def write(path: Path, pieces: Iterable[bytes], written_at: float) -> int:
    """Write a snapshot; its size in bytes.

    Raises:
        OSError: it cannot be written; an earlier one stays as it is.
    """
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(_MAGIC + f"{written_at:.3f}\n".encode())
            for piece in pieces:
                file.write(_RECORD.pack(len(piece), xxh3_64_intdigest(piece)))
                file.write(piece)
            file.write(_RECORD.pack(0, 0))
            size = file.tell()
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()  # a disk that it has filled has room again
        raise
    return size


def read(path: Path, max_age_s: float, now: float | None = None) -> Iterator[bytes]:
    """The pieces of a snapshot. `now`: unix time; None: the present.

    Raises:
        FileNotFoundError: there is none.
        IndexFileError: it is too old, of another release, damaged, or cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IndexFileError(f"cannot read {path}: {error.strerror}") from error
    with file:
        _check_age(path, file.readline(100), max_age_s, time.time() if now is None else now)
        while True:
            record = file.read(_RECORD.size)
            if len(record) < _RECORD.size:
                raise IndexFileError(f"{path} is cut off")
            length, digest = _RECORD.unpack(record)
            if length == 0:
                return
            piece = file.read(length) if length <= MAX_PIECE_BYTES else b""
            if len(piece) != length or xxh3_64_intdigest(piece) != digest:
                raise IndexFileError(f"{path} is damaged")
            yield piece


def _check_age(path: Path, line: bytes, max_age_s: float, now: float) -> None:
    if not line.startswith(_MAGIC):
        raise IndexFileError(f"{path} is no snapshot of this release")
    try:
        age_s = now - float(line[len(_MAGIC) :])
    except ValueError:
        raise IndexFileError(f"{path} is damaged") from None
    if not -60.0 <= age_s <= max_age_s:
        raise IndexFileError(f"{path} is {age_s:.0f} s old; `peers.snapshot.max_age_s` is {max_age_s:.0f}")
