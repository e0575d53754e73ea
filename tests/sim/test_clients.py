import pytest

from extproc.sim.clients import Clients, WorkloadError
from extproc.sim.sessions import Session, Workload
from tests.support.fleet import BLOCK, turn

TURNS = (turn(10, 2),)


def clients(*sessions, **fields):
    return Clients(Workload("w", BLOCK, sessions, **fields))


def ids(runs):
    return [run.session.id for run in runs]


def test_open_loop_starts_sessions_when_they_arrive():
    who = clients(*(Session(str(at), TURNS, arrival_s=float(at)) for at in (1, 2, 2, 5)))
    assert (who.start(0.5), who.next_arrival) == ([], 1.0)
    assert ids(who.start(2.0)) == ["1", "2", "2"]
    assert (who.next_arrival, who.running, who.done) == (5.0, 3, False)


def test_closed_loop_starts_a_session_for_each_that_ends():
    who = clients(*(Session(str(at), TURNS) for at in range(4)), concurrency=2)
    first = who.start(0.0)
    assert ids(first) == ["0", "1"]
    assert who.start(1.0) == []
    assert who.next_arrival is None
    who.ended(first[1])
    assert ids(who.start(2.0)) == ["2"]


def test_a_step_waits_for_the_one_before_the_last():
    who = clients(
        *(Session(f"{step}.{at}", TURNS, step=step) for step in range(3) for at in range(2)),
        concurrency=6,
        steps_in_flight=2,
    )
    begun = who.start(0.0)
    assert ids(begun) == ["0.0", "0.1", "1.0", "1.1"]
    for run in begun[2:]:
        who.ended(run)
    assert who.start(1.0) == []
    who.ended(begun[0])
    assert who.start(2.0) == []
    who.ended(begun[1])
    last = who.start(3.0)
    assert ids(last) == ["2.0", "2.1"]
    for run in last:
        who.ended(run)
    assert who.done


def test_the_workload_is_read_one_session_ahead():
    read = []

    def sessions():
        for at in range(1000):
            read.append(at)
            yield Session(str(at), TURNS)

    Clients(Workload("w", BLOCK, sessions(), concurrency=3)).start(0.0)
    assert len(read) == 4


def test_a_session_that_can_never_start_is_an_error():
    with pytest.raises(WorkloadError, match="no arrival time"):
        clients(Session("s", TURNS))


def test_arrivals_must_ascend():
    who = clients(*(Session(str(at), TURNS, arrival_s=float(at)) for at in (3, 1)))
    with pytest.raises(WorkloadError, match="sort them"):
        who.start(3.0)


def test_turns_may_be_a_generator():
    who = clients(Session("s", (t for t in (turn(10, 2), turn(20, 2)))), concurrency=1)
    (run,) = who.start(0.0)
    assert [run.next_turn().prompt_tokens, run.next_turn().prompt_tokens] == [10, 20]
    assert run.next_turn() is None
