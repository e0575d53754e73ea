import msgspec
import pytest

from extproc.core.errors import ProtocolError
from extproc.core.kv_index import KvIndex
from extproc.core.kv_transfer import EnginePart
from extproc.protocol import index_snapshot
from extproc.protocol.index_snapshot import SnapshotReader, WorkerMemory, header, pieces, read
from extproc.protocol.kv_sequence_types import (
    SequenceMemory,
)
from tests.support.core import stored, worker

SEQUENCE = SequenceMemory(41, ((40, 7), (41, (1 << 64) - 1)), 0, cleared=False, kept_replays=True)


def memory(n=0):
    index = KvIndex()
    index.add_worker(worker(n), "model", "tokenizer")
    index.apply(worker(n), stored(range(160)))
    event = stored(range(500, 600), first_handle=100)
    handles = tuple(handle.to_bytes(32, "big") for handle in event.block_hashes)
    index.apply(worker(n), _with(event, handles))
    return WorkerMemory(worker(n), "model", "tokenizer", SEQUENCE, index.export(worker(n), 4)), index


def _with(event, handles):
    return type(event)(handles, event.parent, event.token_ids, event.block_size)


def test_what_is_known_survives_in_pieces():
    one, index = memory(0)
    two, _ = memory(1)
    assert len(one.parts) > 2
    found = read([header(), *pieces(one), *pieces(two)])
    assert found == {worker(0): one, worker(1): two}
    other = KvIndex()
    other.add_worker(worker(0), "model", "tokenizer")
    for part in found[worker(0)].parts:
        other.restore(worker(0), part)
    assert sorted(other.confirmed(worker(0))) == sorted(index.confirmed(worker(0)))
    assert found[worker(0)].blocks == 16


def test_what_is_no_index_is_refused():
    one, _ = memory()
    piece = next(pieces(one))
    part = list(pieces(one))[1]
    for nonsense in (
        [b""],
        [b"\xc1"],
        [piece],
        [msgspec.msgpack.encode(("warmroute-index", 99))],
        [header(), part],
        [header(), piece, b"\x92\x02\x01"],
        [header(), b"\x92" * 100_000],
        [header(), b"\x92\x01\xc4" + b"x" * (5 << 20)],
    ):
        with pytest.raises(ProtocolError):
            read(nonsense)


def test_sizes_are_bounded(monkeypatch):
    monkeypatch.setattr(index_snapshot, "MAX_BLOCKS", 10)
    one, _ = memory()
    with pytest.raises(ProtocolError, match="more than 10 blocks"):
        read([header(), *pieces(one)])
    monkeypatch.setattr(index_snapshot, "MAX_WORKERS", 1)
    reader = SnapshotReader()
    reader.take(header())
    reader.take(next(pieces(memory(0)[0])))
    with pytest.raises(ProtocolError, match="more than 1 workers"):
        reader.take(next(pieces(memory(1)[0])))


def test_a_piece_of_the_usual_size_stays_far_below_the_limit():
    handles = tuple(n.to_bytes(32, "big") for n in range(index_snapshot.PART_BLOCKS))
    blocks = tuple((1 << 64) - 1 - n for n in range(index_snapshot.PART_BLOCKS))
    part = EnginePart(16, 0, ((None, len(handles)),), handles, blocks, ())
    whole = WorkerMemory(worker(), "m", "t", SEQUENCE, [part])
    assert max(map(len, pieces(whole))) < index_snapshot.MAX_PIECE_BYTES / 4
