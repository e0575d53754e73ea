"""What the router books in each rollout mode, and where requests for adapters go."""

from itertools import count
from random import Random

from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.namespace import Namespace
from extproc.core.policies import POLICIES
from extproc.core.rollout import Mode
from extproc.core.router import Router, RouterSettings
from extproc.core.types import BlockRemoved, Completion, Outcome
from tests.support.core import BLOCK, NAMESPACE, members, metrics, request, stored, worker

PROMPT = range(1, 1 + 20 * BLOCK)


def make_router(workers=3, **fields):
    ids = count()
    costs = CostSettings(prefill_tokens_per_s=1000.0)
    router = Router(
        POLICIES["token-load"](costs),
        Random(1),
        new_lease_id=lambda: f"l{next(ids)}",
        others=[POLICIES["least-load"](costs), POLICIES["round-robin"](costs)],
        pools={"default": PoolFacts("model", "tokenizer", BLOCK)},
        costs=costs,
        settings=RouterSettings(**fields),
    )
    router.on_membership(members(workers), 0.0)
    return router


def test_an_observed_request_is_decided_and_booked_nowhere():
    router = make_router()
    decision = router.schedule(request(PROMPT, mode=Mode.OBSERVE), 1.0)
    assert len(decision.candidates) == 3
    assert len(router.ledger) == 0
    assert router.index.stats().reservations == 0
    assert router.ledger.load(decision.chosen.worker, 1.0).active == 0
    router.on_first_token(decision.lease_id, 1.1)
    router.on_served(decision.lease_id, worker(2).endpoint, 1.1)
    done = Completion(Outcome.FINISHED, served_by=worker(2).endpoint, cached_tokens=0)
    released = router.release(decision.lease_id, done, 2.0)
    assert released.lease.decision is decision
    assert router.release(decision.lease_id, done, 2.0) is None


def test_an_observed_request_that_nobody_ends_is_written_off():
    router = make_router(lease_expiry_s=10.0)
    router.schedule(request(PROMPT, mode=Mode.OBSERVE), 1.0)
    assert router.tick(5.0) == []
    (lost,) = router.tick(11.5)
    assert lost.completion.outcome is Outcome.LOST


def test_evictions_of_an_observed_request_are_those_of_who_served_it():
    router = make_router()
    for n in range(3):
        router.on_kv_events(worker(n), [BlockRemoved((0,))], 0.5)
    decision = router.schedule(request(PROMPT, mode=Mode.OBSERVE), 1.0)
    other = next(c.worker for c in decision.candidates[1:])
    router.on_kv_events(other, [BlockRemoved((1, 2))], 1.5)
    done = Completion(Outcome.FINISHED, served_by=other.endpoint)
    assert router.release(decision.lease_id, done, 2.0).evicted_blocks == 2


def test_in_shadow_a_plain_policy_acts_and_ours_is_recorded():
    router = make_router()
    router.on_kv_events(worker(1), [stored(list(PROMPT))], 0.5)
    decisions = [
        router.schedule(request((*PROMPT, 7), mode=Mode.SHADOW, policy="round-robin"), 1.0) for _ in range(3)
    ]
    assert {decision.chosen.worker for decision in decisions} == {worker(0), worker(1), worker(2)}
    assert {decision.policy for decision in decisions} == {"round-robin"}
    for decision in decisions:
        (ours,) = decision.shadow
        assert (ours.policy, ours.chosen.worker) == ("token-load", worker(1))
    enforced = router.schedule(request((*PROMPT, 7)), 1.0)
    assert (enforced.policy, enforced.shadow) == ("token-load", ())


LAW = Namespace(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, adapter="law")


def ask_for_law(router, base=1):
    tokens = range(base * 10_000, base * 10_000 + 20 * BLOCK)
    return router.schedule(request(tokens, namespace=LAW), 1.0)


def test_requests_for_an_adapter_go_where_it_is_and_follow_it():
    router = make_router()
    router.on_models(worker(0).endpoint, None, [])
    router.on_models(worker(1).endpoint, None, ["law"])
    router.on_models(worker(2).endpoint, None, [])
    assert {ask_for_law(router, n).chosen.worker for n in range(1, 6)} == {worker(1)}
    router.on_models(worker(1).endpoint, None, [])
    router.on_models(worker(2).endpoint, None, ["law"])
    assert ask_for_law(router, 9).chosen.worker == worker(2)


def test_a_worker_that_has_the_adapter_on_its_gpu_is_cheaper():
    router = make_router(2)
    for n in range(2):
        router.on_models(worker(n).endpoint, None, ["law", "art"])
    router.on_metrics(worker(0).endpoint, {0: metrics(adapters=("art",), max_adapters=1)}, 0.5)
    router.on_metrics(worker(1).endpoint, {0: metrics(adapters=(), max_adapters=1)}, 0.5)
    decision = ask_for_law(router)
    assert decision.chosen.worker == worker(1)
    waits = {c.worker: c.priced.worker.adapter_ms for c in decision.candidates}
    assert waits[worker(0)] > waits[worker(1)] == router.costs.adapter_load_ms
    again = {c.worker: c.priced.worker.adapter_ms for c in ask_for_law(router, 2).candidates}
    assert again[worker(1)] == 0.0
    base = router.schedule(request(PROMPT), 1.0)
    assert {c.priced.worker.adapter_ms for c in base.candidates} == {0.0}


def test_blocks_of_an_adapter_are_no_hit_for_another_or_the_base_model():
    router = make_router(1)
    router.on_kv_events(worker(0), [stored(list(PROMPT), lora_name="law")], 0.5)
    spaces = {
        "law": LAW,
        "base": NAMESPACE,
        "art": LAW._replace(adapter="art"),
        "salt": NAMESPACE._replace(cache_salt="law"),
        "both": LAW._replace(cache_salt="law"),
    }
    hits = {
        name: router.schedule(request((*PROMPT, 7), namespace=space), 1.0).chosen.cached_tokens
        for name, space in spaces.items()
    }
    assert hits == {"law": 20 * BLOCK, "base": 0, "art": 0, "salt": 0, "both": 0}
