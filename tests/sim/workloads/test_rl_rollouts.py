from collections import Counter
from itertools import pairwise

from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.rl_rollouts import rl_rollouts, rl_rollouts_distinct
from tests.sim.workloads.support import flat


def test_it_is_the_workload_that_was_published():
    workload = rl_rollouts(WorkloadOptions())
    sessions = flat(workload)
    assert workload.concurrency == 16
    assert workload.steps_in_flight == 2
    assert workload.rollouts
    assert set(Counter(s.step for s, _ in sessions).values()) == {8}
    assert [s.step for s, _ in sessions] == sorted(s.step for s, _ in sessions)
    for session, turns in sessions:
        assert session.arrival_s is None
        assert [turn.prompt_tokens for turn in turns] == [2000 + 1000 * turn for turn in range(10)]
        assert {turn.output_tokens for turn in turns[:-1]} == {1000}
        assert turns[-1].output_tokens == (8000 if session.group == "straggler" else 1000)
        assert {turn.max_output_tokens for turn in turns} == {None}
    stragglers = Counter(s.step for s, _ in sessions if s.group == "straggler")
    assert set(stragglers.values()) == {2}
    assert len(stragglers) == len({s.step for s, _ in sessions})


def test_each_turn_goes_on_where_the_one_before_ended():
    for _, turns in flat(rl_rollouts(WorkloadOptions())):
        for before, after in pairwise(turns):
            assert after.blocks[: len(before.blocks)] == before.blocks


def test_rollouts_of_a_step_share_their_problem_and_nothing_else():
    workload = rl_rollouts(WorkloadOptions())
    sessions = flat(workload)
    one, sibling, stranger = sessions[0][1][-1], sessions[1][1][-1], sessions[8][1][-1]
    assert one.blocks[:125] == sibling.blocks[:125]
    assert not set(one.blocks[125:]) & set(sibling.blocks[125:])
    assert not set(one.blocks) & set(stranger.blocks)


def test_rollouts_can_have_problems_of_their_own():
    sessions = flat(rl_rollouts_distinct(WorkloadOptions()))
    assert not set(sessions[0][1][-1].blocks) & set(sessions[1][1][-1].blocks)
