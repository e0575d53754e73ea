from extproc.sim.experiment import Load
from loadtests.standing.cases import Traces, cases


def test_the_knee_is_found_in_a_run_that_is_not_compared():
    for case in cases(Traces(), (1, 2, 3), 100).values():
        compared = [options for _, options in case.options]
        assert len(compared) == 3
        assert case.tuning not in compared


def test_traces_are_compared_on_the_parts_that_were_held_out(tmp_path):
    case = cases(Traces(azure=tmp_path / "azure.csv"), (1, 2, 3), 100)["azure-control"]
    assert case.tuning.part == (0, 4)
    assert [options.part for _, options in case.options] == [(1, 4), (2, 4), (3, 4)]


def test_more_rollouts_at_once_make_a_longer_run():
    case = cases(Traces(), (1,), 100)["rl-rollouts"]
    few, many = (case.make(Load("concurrency", load))(case.tuning) for load in (16, 64))
    assert (few.concurrency, many.concurrency) == (16, 64)
    assert many.steps_in_flight == 4 * few.steps_in_flight
    assert len(list(many.sessions)) == 4 * len(list(few.sessions))
