"""Request bodies: collected from pieces, sent on in pieces, without copying more than is needed."""

from collections.abc import Iterator

from extproc.protocol.ext_proc_messages import PieceReply, Side

PIECE_BYTES = 62 * 1024
"""Largest body piece in FULL_DUPLEX_STREAMED (Endpoint Picker Protocol)."""

_SMALL = 4 * 1024


class BodyBuffer:
    """A body that arrives in pieces. One copy is made, in `take`; none if it came as one piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []
        self.size = 0

    def add(self, piece: bytes) -> None:
        """Append a piece. Short ones share a buffer, so that a body of single bytes costs its own size."""
        self.size += len(piece)
        if len(piece) >= _SMALL or not self._pieces:
            self._pieces.append(piece)
        elif isinstance(last := self._pieces[-1], bytearray):
            last += piece
        else:
            self._pieces.append(bytearray(piece))

    def take(self) -> bytes:
        """The whole body. The buffer is empty afterwards."""
        body = b"".join(self._pieces)  # a single bytes object is returned as it is
        self.clear()
        return body

    def clear(self) -> None:
        """Drop what was collected."""
        self._pieces.clear()
        self.size = 0


def cut(body: bytes, side: Side, *, last: bool) -> Iterator[PieceReply]:
    """`body` in pieces of at most `PIECE_BYTES`, as views of its memory.

    With `last` exactly one of them ends the stream, even if the body is empty; without it none does, and an
    empty body has no piece.
    """
    if len(body) <= PIECE_BYTES:
        if body or last:
            yield PieceReply(side, body, last)
        return
    view = memoryview(body)
    for start in range(0, len(body), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield PieceReply(side, view[start:end], last and end >= len(body))
