"""Admission in the simulated fleet: what it changes under overload, and that it changes nothing else."""

from dataclasses import replace
from functools import cache, partial

import pytest

from extproc.core.admission_queue import QueueSettings
from extproc.core.saturation import RoomSettings
from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.hardware import ENGINE_PRESETS
from extproc.sim.holding_router import HoldingRouter
from extproc.sim.hosted_router import HostedRouter
from extproc.sim.results import result_of
from extproc.sim.routing import HoldFacts
from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.overload import overload
from tests.support.fleet import alone, documents, simulate, turn

GOLD = {"gold": 1}
SHORT = {"duration_s": 30.0, "flood_from_s": 5.0, "flood_to_s": 20.0}


@cache
def run(hold=None):
    """Figures by tenant of a short overload; None: nothing is held."""
    maker = partial(HostedRouter if hold is None else HoldingRouter, "token-load")
    settings = FleetSettings(
        engine=ENGINE_PRESETS["medium"].engine(16, max_num_seqs=256), hold=(hold or HELD).facts
    )
    measures = Fleet(overload(WorkloadOptions(), **SHORT), maker, settings).run()
    return result_of("p", measures, {})


class Hold:
    """Facts that can be told apart, for the cache."""

    def __init__(self, **fields):
        self.facts = HoldFacts(**{"priorities": GOLD, **fields})


HELD = Hold()


def by_tenant(result, name):
    return {tenant: figures[name] for tenant, figures in result["groups"].items()}


def test_a_flood_becomes_nobody_elses_wait():
    held, free = run(HELD), run()
    for tenant in ("gold", "quiet"):
        before, after = free["groups"][tenant], held["groups"][tenant]
        assert after["ttft_ms"]["p99"] < before["ttft_ms"]["p99"] / 2
        assert after["good"] > 0.9 * after["requests"] > 0
        assert after["failed"] == 0
    assert held["groups"]["flood"]["failed"] > 0  # it is twice what the fleet can serve


def test_every_request_ends_once_served_or_refused():
    held, free = run(HELD), run()
    assert held["requests"] == free["requests"]
    ended = sum(by_tenant(held, "requests").values()) + held["failed"]
    assert ended == held["requests"]
    assert held["failures"] == {"held too long": held["failed"]}


def test_nobody_waits_longer_than_allowed():
    patient, hasty = run(Hold(max_wait_s=5.0)), run(HELD)
    assert patient["groups"]["flood"]["ttft_ms"]["p99"] < hasty["groups"]["flood"]["ttft_ms"]["p99"]
    assert patient["failed"] > hasty["failed"]


def test_equal_weights_share_alike_and_others_by_weight():
    even = run(Hold(priorities={}))
    heavy = run(Hold(priorities={}, weights={"flood": 50.0}))
    assert by_tenant(even, "ttft_ms")["quiet"]["p95"] < by_tenant(even, "ttft_ms")["flood"]["p95"] / 2
    assert by_tenant(heavy, "ttft_ms")["quiet"]["p95"] > by_tenant(even, "ttft_ms")["quiet"]["p95"]


def test_a_short_queue_refuses_sooner():
    assert run(Hold(queue=QueueSettings(max_requests=20)))["failed"] > run(HELD)["failed"]


@pytest.mark.parametrize(
    "workload", [documents(60, every_s=0.1), alone([turn(100, 5, unique=n) for n in range(20)], 1)]
)
def test_a_fleet_that_copes_is_not_changed(workload):
    held = simulate(workload, partial(HoldingRouter, "token-load"))
    free = simulate(workload, partial(HostedRouter, "token-load"))
    assert list(held.e2e) == list(free.e2e)
    assert held.sent == free.sent


def test_a_cap_is_kept():
    """One request at each of two workers: the third waits for the first to end."""
    workload = alone([turn(160, 20, unique=n) for n in range(3)], 0.001)
    hold = HoldFacts(room=RoomSettings(None, None, max_requests=1))
    capped = simulate(workload, partial(HoldingRouter, "token-load"), replicas=2, hold=hold)
    free = simulate(workload, partial(HostedRouter, "token-load"), replicas=2)
    assert sorted(capped.ttft)[2] > min(capped.e2e) - 0.003
    assert sorted(free.ttft)[2] < min(free.e2e) - 0.003
    assert min(capped.tpot) == pytest.approx(sorted(capped.tpot)[2])  # each alone


def test_one_seed_one_result():
    settings = FleetSettings(engine=ENGINE_PRESETS["medium"].engine(16), hold=HELD.facts)
    results = [
        result_of(
            "p",
            Fleet(
                overload(WorkloadOptions(limit=400), **SHORT),
                partial(HoldingRouter, "token-load"),
                replace(settings, seed=seed),
            ).run(),
            {},
        )
        for seed in (1, 1)
    ]
    assert results[0] == results[1]
