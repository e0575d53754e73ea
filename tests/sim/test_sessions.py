import pytest

from extproc.sim.sessions import Session, Workload, limited, offered
from tests.support.fleet import BLOCK, turn


def workload(**fields):
    sessions = [Session(str(at), (turn(10, 2), turn(20, 2)), arrival_s=2.0 * at) for at in range(50)]
    return Workload("w", BLOCK, sessions, **fields)


def arrivals(made):
    return [session.arrival_s for session in made.sessions]


def test_known_arrivals_are_compressed():
    assert arrivals(offered(workload(rate=0.5), rate=5.0))[:3] == pytest.approx([0.0, 0.2, 0.4])


def test_unknown_arrivals_become_a_poisson_process():
    made = offered(workload(), rate=10.0, seed=1)
    times = arrivals(made)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5.0, rel=0.5)
    assert times == arrivals(offered(workload(), rate=10.0, seed=1))
    assert times != arrivals(offered(workload(), rate=10.0, seed=2))
    assert (made.rate, made.concurrency) == (10.0, None)


def test_closed_loop_drops_arrivals():
    made = offered(workload(rate=0.5), concurrency=3)
    assert set(arrivals(made)) == {None}
    assert (made.rate, made.concurrency) == (None, 3)


def test_the_workload_s_own_load_is_left_alone():
    own = workload(rate=0.5)
    assert offered(own) is own


@pytest.mark.parametrize("load", [{"rate": 0.0}, {"rate": -1.0}, {"concurrency": 0}])
def test_a_load_is_above_zero(load):
    with pytest.raises(ValueError, match=next(iter(load))):
        offered(workload(), **load)


def test_a_load_is_open_or_closed():
    with pytest.raises(ValueError, match="not both"):
        offered(workload(), rate=1.0, concurrency=1)


def test_a_limit_cuts_the_last_session_short():
    made = list(limited(workload().sessions, 5))
    assert [len(session.turns) for session in made] == [2, 2, 1]
