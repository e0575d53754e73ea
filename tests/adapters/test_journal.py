import pytest

from extproc.adapters.journal import Journal
from extproc.adapters.journal_file import JournalReader
from extproc.core.policies import POLICIES
from extproc.core.types import Completion, Outcome
from extproc.journal.header import JournalError
from extproc.journal.replay import Replay
from tests.support.core import members, request
from tests.support.recorded import HEADER


def drive(router, count):
    router.on_membership(members(2), 0.0)
    for number in range(count):
        decision = router.schedule(request(range(1, 200 + number), request_id=str(number)), 1.0 + number)
        router.release(decision.lease_id, Completion(Outcome.FINISHED), 1.5 + number)


def ids():
    numbers = iter(range(10**9))
    return lambda: str(next(numbers))


def test_what_a_router_did_can_be_replayed(tmp_path):
    journal = Journal(tmp_path / "journal", HEADER, 10**8, 1, pytest.fail)
    journal.open()
    drive(journal.build(POLICIES, ids()), 50)
    journal.close()
    reader = JournalReader(tmp_path / "journal")
    steps = list(Replay(reader.header, POLICIES).run(reader.entries()))
    assert len(steps) == 50
    assert all(step.exact for step in steps)


def test_what_was_flushed_survives_a_sudden_death(tmp_path):
    journal = Journal(tmp_path / "journal", HEADER, 10**8, 1, pytest.fail)
    journal.open()
    router = journal.build(POLICIES, ids())
    drive(router, 5)
    journal.flush()
    reader = JournalReader(tmp_path / "journal")
    assert sum(1 for _ in Replay(reader.header, POLICIES).run(reader.entries())) == 5
    journal.close()


def test_when_it_is_full_the_router_goes_on_and_it_is_said_once(tmp_path):
    said = []
    journal = Journal(tmp_path / "journal", HEADER, 3_000, 1, said.append)
    journal.open()
    router = journal.build(POLICIES, ids())
    drive(router, 300)
    assert len(said) == 1
    assert "requests go on" in said[0]
    assert journal.error == said[0]
    journal.flush()
    journal.close()
    reader = JournalReader(tmp_path / "journal")
    steps = list(Replay(reader.header, POLICIES).run(reader.entries()))
    assert 0 < len(steps) < 300
    assert all(step.exact for step in steps)


def test_a_disk_that_fails_ends_it_without_harm(tmp_path, monkeypatch):
    said = []
    journal = Journal(tmp_path / "journal", HEADER, 10**8, 1, said.append)
    journal.open()
    router = journal.build(POLICIES, ids())

    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal._writer, "flush", full)
    drive(router, 3)
    journal.flush()
    assert "No space left" in said[0]
    drive(router, 3)
    assert len(said) == 1
    journal.close()


def test_what_was_recorded_before_the_file_is_begun_is_in_it(tmp_path):
    journal = Journal(tmp_path / "journal", HEADER, 10**8, 1, pytest.fail)
    router = journal.build(POLICIES, ids())
    drive(router, 20)
    journal.flush()
    assert list(tmp_path.iterdir()) == []
    journal.open()
    drive(router, 20)
    journal.close()
    reader = JournalReader(tmp_path / "journal")
    steps = list(Replay(reader.header, POLICIES).run(reader.entries()))
    assert len(steps) == 40
    assert all(step.exact for step in steps)


@pytest.mark.parametrize("where", ["nowhere/journal", "", "file/journal"])
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path, where):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(JournalError, match="cannot write the journal"):
        Journal(tmp_path / where, HEADER, 10**8, 1, pytest.fail)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
