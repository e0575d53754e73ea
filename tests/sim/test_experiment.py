from dataclasses import replace

import pytest

from extproc.sim.experiment import Load, find_knee, run_one
from extproc.sim.fleet import FleetSettings
from extproc.sim.policies import POLICIES
from extproc.sim.routing import NullRouter
from extproc.sim.sessions import WorkloadOptions
from tests.support.fleet import ENGINE, documents

SETTINGS = FleetSettings(replicas=2, engine=ENGINE)


def make(options):
    return documents(60, seed=options.seed)


@pytest.mark.parametrize(
    ("load", "shown"),
    [(None, {}), (Load("rate", 2.5), {"rate": 2.5}), (Load("concurrency", 4.0), {"concurrency": 4})],
)
def test_a_run_says_what_load_it_was_under(load, shown):
    result = run_one(make, WorkloadOptions(), "mine", POLICIES["round-robin"], SETTINGS, load)
    assert result["policy"] == "mine"
    assert {name: result[name] for name in ("rate", "concurrency") if name in result} == shown
    assert result["requests"] == 60


def test_a_router_that_can_be_closed_is_closed_whatever_happens():
    closed = []

    class Holding(NullRouter):
        name = "holding"

        def __init__(self, facts, seed):
            self.fails = seed == 1

        def route(self, request, now):
            if self.fails:
                raise RuntimeError("broken")
            return 0

        def close(self):
            closed.append(self.fails)

    run_one(make, WorkloadOptions(), "holding", Holding, SETTINGS, None)
    with pytest.raises(RuntimeError, match="broken"):
        run_one(make, WorkloadOptions(), "holding", Holding, replace(SETTINGS, seed=1), None)
    assert closed == [False, True]


def copes_up_to(knee, tried):
    def run(load):
        tried.append(load.value)
        return {
            load.kind: load.value,
            "policy": "p",
            "failed": 0,
            "ttft_ms": {"p95": 1.0 if load.value <= knee else 9.0},
        }

    return run


@pytest.mark.parametrize("knee", [1.0, 3.3, 40.0, 1000.0])
def test_a_knee_is_found_within_a_few_percent(knee):
    tried = []
    results = find_knee(copes_up_to(knee, tried), Load("rate", 1.0), 5.0)
    good = max(r["rate"] for r in results if r["ttft_ms"]["p95"] < 5)
    assert knee / 1.05 <= good <= knee
    assert [r["rate"] for r in results] == sorted(tried)


def test_a_fleet_that_does_not_cope_at_first_is_tried_once():
    tried = []
    find_knee(copes_up_to(0.5, tried), Load("rate", 1.0), 5.0)
    assert tried == [1.0]


def test_a_fleet_that_always_copes_is_not_tried_for_ever():
    tried = []
    find_knee(copes_up_to(1e99, tried), Load("rate", 1.0), 5.0)
    assert len(tried) == 12


def test_concurrency_is_whole():
    tried = []
    find_knee(copes_up_to(5, tried), Load("concurrency", 1.0), 5.0)
    assert all(value == int(value) for value in tried)
    assert 5.0 in tried
