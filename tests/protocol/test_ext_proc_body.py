import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.ext_proc_body import PIECE_BYTES, BodyBuffer, cut
from extproc.protocol.ext_proc_messages import PieceReply, Side

PIECES = st.lists(st.one_of(st.binary(max_size=3), st.integers(4095, 4097).map(bytes)), max_size=30)


@given(PIECES)
def test_pieces_come_out_joined(pieces):
    buffer = BodyBuffer()
    for piece in pieces:
        buffer.add(piece)
    joined = b"".join(pieces)
    assert buffer.size == len(joined)
    assert buffer.take() == joined
    assert (buffer.size, buffer.take()) == (0, b"")


def test_one_piece_is_not_copied():
    piece = bytes(100_000)
    buffer = BodyBuffer()
    buffer.add(piece)
    assert buffer.take() is piece


def test_small_pieces_share_a_buffer():
    buffer = BodyBuffer()
    for _ in range(10_000):
        buffer.add(b"x")
    assert len(buffer._pieces) == 2


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 200_000])
def test_cut(size, last):
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    pieces = list(cut(body, Side.REQUEST, last=last))
    assert b"".join(piece.body for piece in pieces) == body
    assert all(len(piece.body) <= PIECE_BYTES for piece in pieces)
    assert [piece.end_of_stream for piece in pieces].count(True) == int(last)
    if last:
        assert pieces[-1].end_of_stream


def test_an_empty_body_has_a_piece_only_to_end_the_stream():
    assert list(cut(b"", Side.RESPONSE, last=False)) == []
    assert list(cut(b"", Side.RESPONSE, last=True)) == [PieceReply(Side.RESPONSE, b"", end_of_stream=True)]
