from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.flood import flood
from tests.sim.workloads.support import flat


def test_the_flood_shares_its_prefix_and_comes_in_its_time():
    sessions = [(s, turns[0]) for s, turns in flat(flood(WorkloadOptions()))]
    hot = [(s, turn) for s, turn in sessions if s.group == "hot"]
    assert all(10 <= s.arrival_s < 25 for s, _ in hot)
    assert len({tuple(turn.blocks[:250]) for _, turn in hot}) == 1
    tails = [block for _, turn in hot for block in turn.blocks[250:]]
    assert len(set(tails)) == len(tails)
    assert abs(len(hot) - 1800) < 150


def test_the_cold_tail_shares_nothing_and_never_stops():
    cold = [(s, turns[0]) for s, turns in flat(flood(WorkloadOptions())) if s.group == "cold"]
    blocks = [block for _, turn in cold for block in turn.blocks]
    assert len(set(blocks)) == len(blocks)
    assert max(s.arrival_s for s, _ in cold) > 35
    assert min(s.arrival_s for s, _ in cold) < 10
