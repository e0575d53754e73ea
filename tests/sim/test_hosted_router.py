from zlib import crc32

import pytest

from extproc.core.router import Router
from extproc.core.types import BlockStored, EngineMetrics
from extproc.sim.hosted_router import OURS
from extproc.sim.routing import FleetFacts, SimRequest
from tests.support.fleet import BLOCK, ENGINE, turn


def hosted(name="token-load", replicas=3):
    return OURS[name](FleetFacts(replicas, ENGINE), 0)


def ask(name, shared=(), prompt=10 * BLOCK + 1):
    truth = turn(prompt, 5, shared, crc32(name.encode()) & 0xFFFF)
    prefix = tuple(truth.blocks[: (prompt - 1) // BLOCK])
    return SimRequest(name, name, "", "", 0, prompt, BLOCK, prefix, None, truth)


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_policy_of_the_core_is_there_with_the_router_of_the_core(name):
    router = hosted(name)
    assert router.name == name
    assert isinstance(router.router, Router)
    assert router.route(ask("a"), 0.0) in range(3)


def test_it_follows_the_events():
    router = hosted()
    request = ask("a", range(10))
    router.on_kv_events(2, (BlockStored(tuple(range(10)), None, (), BLOCK, chained=True),), 0.0)
    assert router.route(request, 1.0) == 2


def test_requests_on_their_way_count():
    router = hosted()
    first = router.route(ask("a", prompt=5000), 0.0)
    assert router.route(ask("b", prompt=5000), 0.0) != first


def test_a_lease_ends_with_its_request():
    router = hosted()
    router.route(ask("a"), 0.0)
    router.route(ask("b"), 0.0)
    assert len(router.router.ledger) == 2
    router.on_first_token("a", 0.1)
    router.on_finished("a", 0, 5, 0.2)
    router.on_finished("b", None, None, 0.2)
    assert len(router.router.ledger) == 0


def test_first_tokens_are_seen_only_by_the_observer():
    def queued(name):
        router = hosted(name, replicas=1)
        router.route(ask("a", prompt=16_000), 0.0)
        router.on_first_token("a", 0.01)
        (worker,) = router.router.table.all()
        return router.router.ledger.load(worker.id, 0.02).queued_prefill_ms

    assert queued("token-load") > 0
    assert queued("token-load+first-token") == 0


def predicted_prefill_ms(router, name, now):
    router.route(ask(name, prompt=4000), now)
    (state,) = router.router.table.all()
    (lease,) = router.router.ledger.leases(state.id)
    return lease.decision.chosen.cost.prefill_ms


def test_speed_and_lengths_are_learned_from_ends():
    router = hosted(replicas=1)
    predicted = []
    for at in range(20):
        name = f"r{at}"
        predicted.append(predicted_prefill_ms(router, name, 10.0 * at))
        router.on_first_token(name, 10.0 * at + 4.0)
        router.on_finished(name, 0, 77, 10.0 * at + 5.0)
    assert predicted[0] < 1000
    assert predicted[-1] > 3 * predicted[0]
    (state,) = router.router.table.all()
    router.route(ask("next"), 300.0)
    (lease,) = router.router.ledger.leases(state.id)
    assert lease.decision.output.expected == 77


def test_metrics_reach_the_worker_table():
    router = hosted()
    router.on_metrics(1, EngineMetrics(running=4, waiting=2), 3.0)
    assert [s.metrics.running if s.metrics else None for s in router.router.table.all()] == [None, 4, None]


def test_a_gap_costs_the_trust():
    router = hosted()
    router.on_kv_gap(1, 3.0)
    assert [state.kv_trusted for state in router.router.table.all()] == [True, False, True]
