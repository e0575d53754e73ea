import asyncio
import threading
import time

from extproc.adapters import index_file, warm_start
from extproc.adapters.warm_start import SnapshotWriter, from_disk, from_peers
from extproc.core.types import WorkerId
from extproc.protocol.index_snapshot import WorkerMemory, header, pieces
from extproc.protocol.kv_sequence_types import (
    SequenceMemory,
)
from tests.adapters.test_peer_exchange import Replica, connected
from tests.support.ports import free_port
from tests.support.waiting import until

W = WorkerId("w:1")
KNOWN = WorkerMemory(W, "m", "t", SequenceMemory(3, ((3, 9),), 0, cleared=False, kept_replays=True))


class Memory:
    def __init__(self):
        self.given = None

    def give(self, memories):
        self.given = memories


async def whole():
    yield header()
    for piece in pieces(KNOWN):
        yield piece


async def empty():
    yield header()


async def damaged():
    yield b"nonsense"


async def ask(*tellers):
    """What a replica that starts gets from these, in this order."""
    memory, said, peers = Memory(), [], []
    for number, teller in enumerate(tellers):
        peer = Replica(f"p{number}")
        peer.exchange.serves._index = teller
        peers.append(await peer.__aenter__())
    async with Replica("new", [peer.port for peer in peers]) as new:
        if peers:
            await connected(new)
        found = await from_peers(new.exchange, memory, said.append)
    for peer in peers:
        await peer.__aexit__(None, None, None)
    return found, memory.given, said


async def test_the_first_peer_that_knows_something_is_believed():
    found, given, said = await ask(empty, damaged, whole)
    assert found
    assert given == {W: KNOWN}
    assert any("tells nothing" in line for line in said)


async def test_nobody_there_is_no_reason_not_to_start(monkeypatch):
    monkeypatch.setattr(warm_start, "PEERS_S", 0.05)
    memory = Memory()
    async with Replica("new", [free_port()]) as new:
        assert not await from_peers(new.exchange, memory, [].append)
    assert memory.given is None


async def test_peers_that_know_nothing_either():
    assert await ask(empty, empty) == (False, None, [])


async def test_a_snapshot_is_written_and_read_again(tmp_path):
    path, memory, said = tmp_path / "index", Memory(), []
    assert not await from_disk(path, 60.0, memory, said.append)
    await SnapshotWriter(path, 1.0, whole, said.append).write()
    assert await from_disk(path, 60.0, memory, said.append)
    assert memory.given == {W: KNOWN}
    assert said == ["the snapshot tells of 0 blocks on 1 workers"]


async def test_a_bad_or_old_snapshot_is_a_warning_and_a_cold_start(tmp_path):
    path, memory, said = tmp_path / "index", Memory(), []
    path.write_bytes(b"nonsense")
    assert not await from_disk(path, 60.0, memory, said.append)
    index_file.write(path, [b"nonsense"], time.time())
    assert not await from_disk(path, 60.0, memory, said.append)
    index_file.write(path, [header()], time.time() - 61)
    assert not await from_disk(path, 60.0, memory, said.append)
    assert memory.given is None
    assert len(said) == 3
    assert all("we start cold" in line for line in said)


async def test_a_disk_that_is_full_is_said_once(tmp_path):
    said = []
    writer = SnapshotWriter(tmp_path / "none" / "index", 1.0, whole, said.append)
    await writer.write()
    await writer.write()
    (tmp_path / "none").mkdir()
    await writer.write()
    assert ["cannot be written" in line for line in said] == [True, False]


async def test_a_fault_costs_one_snapshot_and_not_all_later_ones(tmp_path):
    said, asked = [], []

    async def faulty():
        asked.append(True)
        if len(asked) == 1:
            raise KeyError("w:1")
        async for piece in whole():
            yield piece

    path = tmp_path / "index"
    writer = asyncio.create_task(SnapshotWriter(path, 0.01, faulty, said.append).run())
    await until(lambda: len(said) == 2)
    assert "KeyError" in said[0]
    assert "again" in said[1]
    assert index_file.read(path, 60.0)
    writer.cancel()
    await asyncio.wait([writer])


async def test_a_snapshot_that_is_being_written_is_whole_before_the_last_one_begins(tmp_path, monkeypatch):
    write, began, going_on = index_file.write, threading.Event(), threading.Event()

    def slow(path, pieces, at):
        began.set()
        assert going_on.wait(30)
        write(path, pieces, at)

    monkeypatch.setattr(index_file, "write", slow)
    said = []
    writer = SnapshotWriter(tmp_path / "index", 1.0, whole, said.append)
    first = asyncio.create_task(writer.write())
    await asyncio.to_thread(began.wait, 30)
    first.cancel()
    last = asyncio.create_task(writer.write())
    await asyncio.wait([first])
    going_on.set()
    await last
    assert said == []
    assert index_file.read(tmp_path / "index", 60.0)
