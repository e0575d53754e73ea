from random import Random

import pytest

from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.policies import TokenLoad
from extproc.core.router import Router, RouterSettings
from extproc.core.snapshot import snapshot
from extproc.core.types import BlockRemoved, Completion, Outcome
from extproc.journal.tap import INPUTS
from tests.support.core import BLOCK, NAMESPACE, members, metrics, request, stored, worker

PROMPT = list(range(1, 330))


def make_router(**settings):
    ids = iter(range(10**6))
    costs = CostSettings()
    router = Router(
        TokenLoad(costs),
        Random(1),
        new_lease_id=lambda: str(next(ids)),
        pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, BLOCK)},
        costs=costs,
        settings=RouterSettings(**settings),
    )
    router.on_membership(members(3), 0.0)
    return router


def traffic(router, look):
    """What was decided, by a router that somebody looks at all the time."""
    rng, chosen = Random(7), []
    for number in range(120):
        now = number * 0.3
        if number % 10 == 0:
            n = rng.randrange(3)
            router.on_metrics(worker(n).endpoint, {0: metrics(running=rng.randrange(3))}, now)
            router.on_kv_events(worker(n), [stored(PROMPT, first_handle=1 + 1000 * number)], now)
        decision = router.schedule(request(PROMPT[: rng.choice((40, 329))], stream=True), now)
        chosen.append((decision.chosen.worker, decision.chosen.cost, decision.reason))
        look(router, now)
        if number % 3:
            done = Completion(
                Outcome.FINISHED,
                first_body_ms=30.0,
                upstream_first_body_ms=29.0,
                duration_ms=90.0,
                cached_tokens=16 * rng.randrange(3),
                output_tokens=20,
            )
            router.release(decision.lease_id, done, now + 0.1)
        look(router, now + 0.2)
    return chosen


def test_looking_changes_no_decision():
    assert traffic(make_router(), snapshot) == traffic(make_router(), lambda router, now: None)


def test_looking_tells_the_router_nothing():
    router = make_router()
    told = []
    for name in INPUTS:
        setattr(router, name, lambda *_, name=name, **__: told.append(name))
    snapshot(router, 1.0)
    assert told == []


def test_it_tells_what_is_known_of_every_worker():
    router = make_router()
    router.on_metrics(worker(1).endpoint, {0: metrics(running=2, waiting=1)}, 1.0)
    router.on_metrics(worker(1).endpoint, {0: metrics(running=2, waiting=1)}, 2.0)
    router.on_kv_events(worker(1), [stored(PROMPT)], 2.0)
    router.on_kv_trust(worker(1), "replayed", trusted=True)
    decision = router.schedule(request(PROMPT), 3.0)
    assert decision.chosen.worker == worker(1)
    seen = snapshot(router, 4.0)
    assert (seen.policy, seen.open_requests) == ("token-load", 1)
    assert seen.distinct_blocks == len(PROMPT) // BLOCK
    assert [w.worker for w in seen.workers] == [worker(0), worker(1), worker(2)]
    _, one, _ = seen.workers
    assert one.ready
    assert one.load.active == 1
    assert one.foreign == (1, 2)
    assert one.metrics_age_s == one.event_age_s == pytest.approx(2.0)
    assert (one.blocks, one.block_size, one.assumed_blocks) == (len(PROMPT) // BLOCK, BLOCK, 0)
    assert (one.kv_trusted, one.kv_cause) == (True, "replayed")
    assert one.confidence == 1.0
    assert one.ttft.per_token_ms == pytest.approx(1000 / CostSettings().prefill_tokens_per_s)


def test_what_is_not_known_is_none():
    _, one, _ = snapshot(make_router(), 1.0).workers
    assert one.metrics is None
    assert one.metrics_age_s is None
    assert one.foreign is None
    assert one.event_age_s is None
    assert one.block_size is None


def test_others_requests_are_not_claimed_from_old_figures():
    router = make_router()
    router.on_metrics(worker(1).endpoint, {0: metrics(running=2)}, 1.0)
    assert snapshot(router, 2.0).workers[1].foreign == (0, 2)
    assert snapshot(router, 60.0).workers[1].foreign is None


def test_it_shows_trouble_where_it_is():
    router = make_router()
    router.on_kv_events(worker(0), [BlockRemoved((5, 6))], 0.0)
    router.on_kv_events(worker(0), [stored(PROMPT[:32], parent=99, first_handle=7)], 0.0)
    for _ in range(3):
        router.on_scrape_failure(worker(2).endpoint)
    zero, one, two = snapshot(router, 1.0).workers
    assert (zero.faults.unknown_removes, zero.faults.orphans) == (2, 2)
    assert not any(one.faults)
    assert (one.ready, two.ready, two.scrape_failures) == (True, False, 3)
    assert (one.reached, two.reached) == (True, False)


def test_it_shows_who_serves_only_because_nobody_else_is_ready():
    router = make_router()
    for n in range(3):
        for began in (1.0, 4.0, 7.0):
            router.on_page_failure(worker(n).endpoint, began, slow=n > 0)
    found = snapshot(router, 9.0).workers
    assert [one.ready for one in found] == [False, True, True]
    assert [one.last_resort for one in found] == [False, True, True]
    assert [one.reached for one in found] == [True, True, True]
    assert [one.scrape_failures for one in found] == [3, 3, 3]
    router.on_metrics(worker(0).endpoint, {0: metrics()}, 10.0)
    found = snapshot(router, 10.0).workers
    assert [(one.ready, one.last_resort) for one in found] == [(True, False), (False, False), (False, False)]


def test_it_tells_how_well_times_are_predicted_and_what_is_in_doubt():
    router = make_router()
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.0)
    router.on_kv_trust(worker(0), "complete", trusted=True)
    router.on_kv_trust(worker(0), "messages are missing", trusted=False)
    decision = router.schedule(request(PROMPT, stream=True), 1.0)
    actual = decision.chosen.cost.ttft_ms * 2
    done = Completion(Outcome.FINISHED, upstream_first_body_ms=actual, cached_tokens=0, output_tokens=1)
    router.release(decision.lease_id, done, 2.0)
    seen = snapshot(router, 3.0)
    assert seen.pools[0].ttft_errors == (1, -0.5, 0.5, 0.5)
    assert [w.doubtful_blocks for w in seen.workers] == [len(PROMPT) // BLOCK, 0, 0]
    assert all(w.cause is None for w in seen.workers)


def test_it_tells_what_the_index_keeps_and_has_given_up():
    router = make_router(max_index_blocks=10)
    router.on_kv_events(worker(0), [stored(range(8 * BLOCK))], 1.0)
    router.on_kv_events(worker(1), [stored(range(8 * BLOCK))], 1.0)
    seen = snapshot(router, 2.0)
    assert (seen.index_entries, seen.index_limit, seen.index_given_up) == (10, 10, 6)
    assert [each.blocks for each in seen.workers] == [2, 8, 0]
