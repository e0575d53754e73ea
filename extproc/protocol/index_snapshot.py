"""What one router knows of the engines' caches, in pieces that another can take: format and checks.

    piece 0        ["warmroute-index", FORMAT]
    each worker    [WORKER, endpoint, rank, model revision, tokenizer revision, place in its event stream]
                   [PART, an `EnginePart`]        one or more, all of the worker before

MessagePack. Sizes are bounded: `MAX_PIECE_BYTES` each, `MAX_WORKERS`, `MAX_BLOCKS` in all. The same format
travels between replicas and lies on disk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from extproc.core.errors import ProtocolError
from extproc.core.kv_transfer import EnginePart
from extproc.core.types import WorkerId
from extproc.protocol.kv_sequence_types import (
    SequenceMemory,
)

FORMAT = 1
PART_BLOCKS = 8192
MAX_PIECE_BYTES = 4 << 20
MAX_WORKERS = 10_000
MAX_BLOCKS = 50_000_000
_MAGIC = "warmroute-index"
_WORKER, _PART = 1, 2

_Header: TypeAlias = tuple[Literal["warmroute-index"], int]


@dataclass(slots=True)
class WorkerMemory:
    """What is known of one worker's cache, and where its event stream stood then."""

    worker: WorkerId
    revision: str
    tokenizer_revision: str
    sequence: SequenceMemory
    parts: list[EnginePart] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """In all parts."""
        return sum(len(part.blocks) for part in self.parts)


def header() -> bytes:
    """The first piece."""
    return msgspec.msgpack.encode((_MAGIC, FORMAT))


def pieces(memory: WorkerMemory) -> Iterator[bytes]:
    """The pieces of one worker."""
    worker = memory.worker
    yield msgspec.msgpack.encode(
        (
            _WORKER,
            worker.endpoint,
            worker.dp_rank,
            memory.revision,
            memory.tokenizer_revision,
            memory.sequence,
        )
    )
    for part in memory.parts:
        yield msgspec.msgpack.encode((_PART, part))


_first = msgspec.msgpack.Decoder(_Header)
_worker = msgspec.msgpack.Decoder(tuple[int, str, int, str, str, SequenceMemory])
_part = msgspec.msgpack.Decoder(tuple[int, EnginePart])


class SnapshotReader:
    """Takes pieces, one after the other; `workers` is what they hold so far."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, WorkerMemory] = {}
        self._begun = False
        self._last: WorkerMemory | None = None
        self._blocks = 0

    def take(self, piece: bytes) -> None:
        """One more piece.

        Raises:
            ProtocolError: it is not one, or one too many.
        """
        if len(piece) > MAX_PIECE_BYTES:
            raise ProtocolError(f"a piece of an index has {len(piece)} bytes; at most {MAX_PIECE_BYTES}")
        try:
            self._take(piece)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"a piece of an index cannot be read: {error}") from error

    def _take(self, piece: bytes) -> None:
        if not self._begun:
            _, version = _first.decode(piece)
            if version != FORMAT:
                raise ProtocolError(f"an index of format {version}; this release reads format {FORMAT}")
            self._begun = True
        elif piece[1:2] == bytes((_WORKER,)):
            _, endpoint, rank, revision, tokenizer, sequence = _worker.decode(piece)
            self._last = WorkerMemory(WorkerId(endpoint, rank), revision, tokenizer, sequence)
            self.workers[self._last.worker] = self._last
            if len(self.workers) > MAX_WORKERS:
                raise ProtocolError(f"an index of more than {MAX_WORKERS} workers")
        else:
            _, part = _part.decode(piece)
            if self._last is None:
                raise ProtocolError("a piece of an index comes before the worker it is of")
            self._blocks += len(part.blocks)
            if self._blocks > MAX_BLOCKS:
                raise ProtocolError(f"an index of more than {MAX_BLOCKS} blocks")
            self._last.parts.append(part)


def read(all_pieces: Iterable[bytes]) -> dict[WorkerId, WorkerMemory]:
    """What the pieces hold.

    Raises:
        ProtocolError: see `SnapshotReader.take`.
    """
    reader = SnapshotReader()
    for piece in all_pieces:
        reader.take(piece)
    return reader.workers
