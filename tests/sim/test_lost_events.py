"""KV events get lost, engines restart, streams die: what the router believes, in a fleet with evictions.

60 documents of 2,000 tokens, three engines that hold a third of them each, the real `Router`.
"""

import functools
from dataclasses import replace

import pytest

from extproc.sim.fleet import FleetSettings
from extproc.sim.hardware import ENGINE_PRESETS
from extproc.sim.sessions import WorkloadOptions, offered
from extproc.sim.workloads.documents import documents
from tests.support.faulty_fleet import Fault, FaultyFleet, cached_share, false_credit, missed_credit

FAULT_AT = 20.0
HIT = 1  # the worker it happens to
SOON = 50  # requests after which belief must be right again

FAULTS = {
    "none": None,
    "gap": Fault("gap", FAULT_AT, HIT, lasts=10.0),
    "silent": Fault("silent", FAULT_AT, HIT),
    "restart": Fault("restart", FAULT_AT, HIT),
    "wiped": Fault("wiped", FAULT_AT, HIT),
}


@functools.cache
def run(kind):
    """(fleet, claims before the fault is over, claims after it)."""
    workload = offered(
        documents(
            WorkloadOptions(seed=1),
            documents=60,
            document_tokens=2000,
            questions=1200,
            answer_tokens=60,
            zipf=0.3,
        ),
        rate=25.0,
        seed=2,
    )
    engine = replace(ENGINE_PRESETS["medium"].engine(16), num_gpu_blocks=3000, max_model_len=8000)
    settings = FleetSettings(replicas=3, engine=engine, kv_replay=False)
    fault = FAULTS[kind]
    fleet = FaultyFleet(workload, settings, [] if fault is None else [fault])
    claims = fleet.run_claims()
    over = FAULT_AT if fault is None else fault.at + fault.lasts
    return fleet, [c for c in claims if c.at < FAULT_AT], [c for c in claims if c.at >= over]


def at_hit_worker(claims):
    return [claim for claim in claims if claim.worker == HIT]


def elsewhere(claims):
    return [claim for claim in claims if claim.worker != HIT]


def states(fleet):
    return fleet.router.router.table.all()


def test_the_fleet_without_a_fault_is_predicted_well_although_it_evicts():
    fleet, before, after = run("none")
    assert false_credit(before) < 0.005
    assert missed_credit([*before, *after]) < 0.005
    assert 0.8 < cached_share(after) < 0.97
    assert fleet.engines[HIT].pool.cached_hashes > 0.9 * 3000


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "none"])
def test_false_credit_is_gone_within_fifty_requests(kind):
    _, _, after = run(kind)
    assert len(after) > 5 * SOON
    assert false_credit(after[SOON:]) < 0.01
    # Of the worker it happened to, too: it is a third of the traffic.
    assert len(at_hit_worker(after[SOON:])) > SOON
    assert false_credit(at_hit_worker(after[SOON:])) < 0.01


def test_what_was_claimed_before_a_gap_is_doubted_from_the_first_request_on():
    """Believed, a fiftieth of it would be false: documents are evicted during the gap."""
    _, _, after = run("gap")
    assert false_credit(at_hit_worker(after)[:SOON]) < 0.005


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind != "none"])
def test_true_credit_of_other_workers_is_untouched(kind):
    fleet, _, after = run(kind)
    assert missed_credit(elsewhere(after)) < 0.005
    assert all(state.kv_trusted for state in states(fleet) if state.id != states(fleet)[HIT].id)
    doubts = fleet.router.router.doubts
    assert all(not doubts.blocks(state.id) for state in states(fleet) if state.id != states(fleet)[HIT].id)


@pytest.mark.parametrize("kind", ["gap", "silent"])
def test_nothing_is_forgotten_where_only_events_were_lost(kind):
    """The engines still have it all, and so many hits go on as if nothing had happened."""
    _, _, untouched = run("none")
    _, _, after = run(kind)
    assert cached_share(after) > 0.97 * cached_share(untouched)
    hit = at_hit_worker(after)
    assert cached_share(hit) > 0.9 * cached_share(at_hit_worker(untouched))
    assert missed_credit(hit[SOON:]) < 0.05  # verified, one by one


@pytest.mark.parametrize("kind", ["restart", "wiped"])
def test_a_restarted_engine_is_filled_again(kind):
    _, _, after = run(kind)
    last = at_hit_worker(after)[-100:]
    assert cached_share(last) > 0.75
    assert false_credit(last) < 0.01


def test_health_says_what_happened():
    for kind, words in {
        "gap": "events were lost",
        "silent": "have stopped",
        "wiped": "did not say so",
        "restart": "the engine restarted",
    }.items():
        fleet, _, _ = run(kind)
        assert words in states(fleet)[HIT].kv_cause, kind
