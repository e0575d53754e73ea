from collections import Counter

import pytest

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.overload import overload
from tests.sim.workloads.support import flat


def test_one_tenant_floods_for_a_while_and_the_others_go_on():
    sessions = [s for s, _ in flat(overload(WorkloadOptions()))]
    counts = Counter(s.tenant for s in sessions)
    assert abs(counts["gold"] - 600) < 90
    assert abs(counts["quiet"] - 120) < 35
    assert abs(counts["flood"] - 1020) < 120
    beside = [s for s in sessions if s.tenant == "flood" and not 10 <= s.arrival_s < 40]
    assert abs(len(beside) - 60) < 25
    assert [s.arrival_s for s in sessions] == sorted(s.arrival_s for s in sessions)


def test_no_prompt_is_like_another():
    turns = [turns[0] for _, turns in flat(overload(WorkloadOptions(limit=200)))]
    assert len({turn.blocks[0] for turn in turns}) == len(turns) == 200
    assert {(turn.prompt_tokens, turn.output_tokens) for turn in turns} == {(1500, 150)}


def test_there_is_no_trace(tmp_path):
    with pytest.raises(WarmrouteError, match="takes no trace"):
        overload(WorkloadOptions(trace=tmp_path))
