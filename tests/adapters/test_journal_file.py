import zlib

import pytest

from extproc.adapters.journal_file import MAGIC, JournalFullError, JournalReader, JournalWriter
from extproc.core.policies import POLICIES
from extproc.journal.header import JournalError
from extproc.journal.replay import Replay
from tests.support.full_disk import full_at
from tests.support.recorded import HEADER, Traffic

ENTRIES = [[2, [float(number)]] for number in range(1000)]


def written(path, entries=ENTRIES, max_bytes=10**9, keep=2):
    writer = JournalWriter(path, HEADER, max_bytes, keep)
    writer.open()
    for entry in entries:
        writer.write(entry)
    writer.close()
    return path


def test_what_was_written_is_read(tmp_path):
    reader = JournalReader(written(tmp_path / "journal"))
    assert reader.header == HEADER
    assert list(reader.entries()) == ENTRIES
    assert not reader.torn


def test_nobody_else_may_read_it(tmp_path):
    assert written(tmp_path / "journal").stat().st_mode & 0o077 == 0


def test_recorded_traffic_is_replayed_from_disk_exactly(tmp_path):
    traffic = Traffic().run(600)
    path = written(tmp_path / "journal", traffic.entries)
    reader = JournalReader(path)
    steps = list(Replay(reader.header, POLICIES).run(reader.entries()))
    assert len(steps) == len(traffic.decisions) + traffic.refused
    assert all(step.exact for step in steps)


def test_a_torn_end_costs_no_more_than_itself(tmp_path):
    path = tmp_path / "journal"
    writer = JournalWriter(path, HEADER, 10**9, 1)
    writer.open()
    for entry in ENTRIES:
        writer.write(entry)
        if entry[1][0] % 100 == 99:
            writer.flush()
    writer.close()
    whole = path.read_bytes()
    for cut in (1, 3, 5, 40):
        path.write_bytes(whole[:-cut])
        reader = JournalReader(path)
        assert list(reader.entries()) == ENTRIES[:900]
        assert reader.torn


def test_a_full_disk_is_an_error_and_costs_the_piece_that_has_no_room(tmp_path):
    path = tmp_path / "journal"
    writer = JournalWriter(path, HEADER, 10**9, 1)
    writer.open()
    writer.write(ENTRIES[0])
    writer.flush()
    writer.write(ENTRIES[1])
    with full_at(path.stat().st_size + 3), pytest.raises(OSError, match="large"):
        writer.flush()
    writer.abandon()
    reader = JournalReader(path)
    assert list(reader.entries()) == ENTRIES[:1]
    assert reader.torn


def test_a_full_journal_ends_whole(tmp_path):
    path = tmp_path / "journal"
    writer = JournalWriter(path, HEADER, 20_000, 1)
    writer.open()
    kept = []

    def fill():
        for number in range(10**6):
            writer.write([2, [number / 7]])
            kept.append([2, [number / 7]])

    with pytest.raises(JournalFullError, match=r"0\.02 MB"):
        fill()
    writer.close()
    assert path.stat().st_size < 60_000
    assert list(JournalReader(path).entries()) == kept
    assert len(kept) > 100


def test_each_start_begins_anew_and_keeps_some(tmp_path):
    for number in range(5):
        written(tmp_path / "journal", [[2, [float(number)]]], keep=2)
    names = ["journal", "journal.1", "journal.2"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [next(JournalReader(tmp_path / name).entries())[1] for name in names] == [[4.0], [3.0], [2.0]]


def test_a_start_that_fails_leaves_the_journals_of_others_alone(tmp_path):
    running = JournalWriter(tmp_path / "journal", HEADER, 10**9, 2)
    running.open()
    failing = JournalWriter(tmp_path / "journal", HEADER, 10**9, 2)
    failing.write([2, [7.0]])
    failing.close()
    running.write([2, [1.0]])
    running.close()
    assert [file.name for file in tmp_path.iterdir()] == ["journal"]
    assert list(JournalReader(tmp_path / "journal").entries()) == [[2, [1.0]]]


@pytest.mark.parametrize("data", [b"", b"hello", MAGIC])
def test_what_is_no_journal_is_refused(tmp_path, data):
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"no Warmroute journal|is empty"):
        JournalReader(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(JournalError, match="No such file"):
        JournalReader(tmp_path / "nowhere")


def test_damage_is_reported_not_guessed_at(tmp_path):
    path = written(tmp_path / "journal")
    data = bytearray(path.read_bytes())
    data[-10] ^= 0xFF
    path.write_bytes(bytes(data))
    reader = JournalReader(path)
    with pytest.raises(JournalError, match="damaged"):
        list(reader.entries())


def test_a_piece_that_would_fill_the_memory_is_refused(tmp_path):
    path = written(tmp_path / "journal", [])
    bomb = zlib.compress(bytes(100 << 20))
    path.write_bytes(path.read_bytes() + len(bomb).to_bytes(4, "little") + bomb)
    with pytest.raises(JournalError, match="larger than any"):
        list(JournalReader(path).entries())
