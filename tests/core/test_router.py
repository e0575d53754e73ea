from collections import Counter
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from extproc.core.adapter_slots import Standing
from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.errors import NoEndpointError
from extproc.core.load_ledger import IDLE
from extproc.core.policies import POLICIES
from extproc.core.rollout import Mode
from extproc.core.router import Router, RouterSettings
from extproc.core.types import AllBlocksCleared, Completion, EngineMetrics, Member, Outcome, Reason
from tests.support.core import BLOCK, NAMESPACE, hashes, members, metrics, request, stored, worker

DONE = Completion(Outcome.FINISHED)


def make_router(workers=3, *, policy="token-load", seed=1, others=(), shadow=(), **fields):
    ids = count()
    costs = CostSettings(prefill_tokens_per_s=1000.0)
    router = Router(
        POLICIES[policy](costs),
        Random(seed),
        new_lease_id=lambda: f"lease-{next(ids)}",
        others=[other(costs) for other in others],
        shadow=[one(costs) for one in shadow],
        pools={"default": PoolFacts("model", "tokenizer", BLOCK)},
        costs=costs,
        settings=RouterSettings(**fields),
    )
    router.on_membership(members(workers), 0.0)
    return router


PROMPT = list(range(1, 330))


def test_a_warm_prefix_is_found_and_its_length_predicted():
    router = make_router()
    router.on_kv_events(worker(1), [stored(PROMPT)], 0.0)
    decision = router.schedule(request(PROMPT), 1.0)
    assert decision.chosen.worker == worker(1)
    assert decision.chosen.cached_tokens == (len(PROMPT) - 1) // BLOCK * BLOCK
    assert decision.reason is Reason.WARM_EXACT


def test_an_engine_that_serves_on_while_its_events_are_cut_off_is_known_by_what_is_sent_there():
    router = make_router(1)
    router.on_kv_events(worker(), [stored(range(5000, 5160))], 0.0)
    router.on_kv_suspended(worker(), suspended=True)
    predicted = []
    for now in (0.0, 10.0, 20.0):
        router.on_metrics(worker().endpoint, {0: metrics()}, now)
        decision = router.schedule(request(PROMPT), now + 0.1)
        predicted.append(decision.chosen.cached_tokens)
        found = 320 if now else 0
        done = Completion(Outcome.FINISHED, prompt_tokens=len(PROMPT), cached_tokens=found, output_tokens=9)
        router.release(decision.lease_id, done, now + 0.5)
        router.tick(now + 5.0)
    assert predicted == [0, 320, 320]
    router.on_kv_suspended(worker(), suspended=False)
    router.on_kv_events(worker(), [stored(PROMPT[:160], first_handle=500)], 30.0)
    assert router.schedule(request(PROMPT), 31.0).chosen.cached_tokens == 160  # as its events tell


def test_prompts_in_flight_count_as_soon_as_they_are_routed():
    router = make_router()
    first = router.schedule(request(PROMPT, request_id="a"), 1.0)
    second = router.schedule(request(PROMPT, request_id="b"), 1.0)
    assert first.chosen.cached_tokens == 0
    offered = {candidate.worker: candidate.cached_tokens for candidate in second.candidates}
    assert offered.pop(first.chosen.worker) == (len(PROMPT) - 1) // BLOCK * BLOCK
    assert set(offered.values()) == {0}


def test_a_burst_with_one_prefix_neither_scatters_nor_herds():
    router = make_router()
    counts = Counter(
        router.schedule(request(range(1, 8000), request_id=str(n), max_output=200), 1.0).chosen.worker
        for n in range(120)
    )
    assert len(counts) == 3
    assert max(counts.values()) < 0.6 * 120


def test_five_hundred_equal_prompts_at_once_spread_and_still_hit():
    router = make_router(3)
    chosen = [
        router.schedule(request(range(1, 8001), request_id=str(n), max_output=200), 1.0).chosen
        for n in range(500)
    ]
    counts = Counter(candidate.worker for candidate in chosen)
    assert len(counts) == 3
    assert max(counts.values()) <= 0.45 * 500
    computed = [candidate for candidate in chosen if candidate.cached_tokens == 0]
    assert len(computed) <= 3
    cached = sum(candidate.cached_tokens for candidate in chosen)
    assert cached / (8000 * (500 - len(computed))) > 0.9


def test_a_reservation_ends_with_its_lease():
    router = make_router()
    first = router.schedule(request(PROMPT), 1.0)
    router.release(first.lease_id, Completion(Outcome.CANCELLED), 2.0)
    assert router.schedule(request(PROMPT), 3.0).chosen.cached_tokens == 0


def test_pitfall_43_cleared_blocks_are_not_matched():
    router = make_router()
    router.on_kv_events(worker(1), [stored(PROMPT), AllBlocksCleared()], 0.0)
    assert router.schedule(request(PROMPT), 1.0).chosen.cached_tokens == 0


def test_pitfall_41_only_contiguous_prefixes_count():
    router = make_router()
    a, b = list(range(1, 17)), list(range(101, 117))
    router.on_kv_events(worker(0), [stored(a)], 0.0)
    router.on_kv_events(worker(1), [stored(b)], 0.0)
    assert router.schedule(request([*b, *a, 5]), 1.0).chosen.worker == worker(1)


def test_pitfall_40_nothing_is_claimed_below_one_full_block():
    router = make_router()
    router.on_metrics(worker(0).endpoint, {0: metrics(block_size=4096)}, 0.5)
    decision = router.schedule(request(range(1, 2000)), 1.0)
    assert all(c.cached_tokens == 0 for c in decision.candidates)
    again = router.schedule(request(range(1, 2000)), 1.0)
    zero = next(c for c in again.candidates if c.worker == worker(0))
    assert zero.block_size == 4096
    assert zero.cached_tokens == 0


def test_pitfall_39_the_engines_block_size_wins_over_the_configured_one():
    router = make_router(1)
    router.on_kv_events(worker(0), [stored(PROMPT, block_size=64)], 0.0)
    decision = router.schedule(request(PROMPT), 1.0)
    assert decision.chosen.block_size == 64
    assert decision.chosen.cached_tokens == 320


def test_pitfall_60_idle_workers_share_distinct_prompts():
    router = make_router(4)
    counts = Counter()
    for n in range(200):
        decision = router.schedule(request(range(n * 1000, n * 1000 + 100)), float(n))
        counts[decision.chosen.worker] += 1
        router.release(decision.lease_id, DONE, n + 0.5)
    assert len(counts) == 4
    assert max(counts.values()) < 80


def test_pitfall_62_a_light_load_does_not_throw_affinity_away():
    router = make_router(2)
    router.on_kv_events(worker(1), [stored(PROMPT)], 0.0)
    router.schedule(request(range(5000, 5050), subset=frozenset({worker(1).endpoint})), 1.0)
    assert router.schedule(request(PROMPT), 2.0).chosen.worker == worker(1)


def test_pitfall_66_a_chat_stays_with_its_replica():
    router = make_router(2)
    tokens, workers, handle = list(range(1, 60)), [], 1
    for turn in range(10):
        decision = router.schedule(request(tokens), float(turn))
        workers.append(decision.chosen.worker)
        router.on_kv_events(decision.chosen.worker, [stored(tokens, first_handle=handle)], 0.0)
        handle += 1000
        router.release(decision.lease_id, DONE, turn + 0.5)
        tokens += range(10_000 * (turn + 1), 10_000 * (turn + 1) + 40)
    assert len(set(workers)) == 1


def test_an_idle_cold_worker_beats_a_warm_one_with_a_long_queue():
    router = make_router(2)
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.0)
    only = frozenset({worker(0).endpoint})
    for n in range(4):
        router.schedule(request(range(9000 + n, 12_000 + n), subset=only), 1.0)
    assert router.schedule(request(PROMPT), 1.0).chosen.worker == worker(1)


def test_pitfall_72_a_silent_worker_is_as_bad_as_the_worst_that_speaks():
    router = make_router(2, stale_after_s=5.0)
    router.on_metrics(worker(0).endpoint, {0: metrics()}, 0.0)
    router.on_metrics(worker(1).endpoint, {0: metrics(waiting=8, running=4)}, 19.0)
    decision = router.schedule(request(PROMPT), 20.0)
    silent = next(c for c in decision.candidates if c.worker == worker(0))
    assert silent.cost.queue_ms == decision.candidates[0].cost.queue_ms > 0.0
    assert silent.metrics_age_s == 20.0


def test_other_routers_traffic_is_seen_through_the_engine():
    router = make_router(2)
    router.on_metrics(worker(0).endpoint, {0: metrics(waiting=5, running=3)}, 1.0)
    router.on_metrics(worker(1).endpoint, {0: metrics()}, 1.0)
    for _ in range(5):
        decision = router.schedule(request(range(100)), 1.0)
        assert decision.chosen.worker == worker(1)
        router.release(decision.lease_id, DONE, 1.0)


def test_nothing_ready_is_an_error_that_says_why():
    router = make_router(1)
    router.on_membership((), 0.0)
    with pytest.raises(NoEndpointError, match="no workers"):
        router.schedule(request(range(3)), 0.0)
    router.on_membership(members(1), 1.0)
    with pytest.raises(NoEndpointError, match="gateway allows"):
        router.schedule(request(range(3), subset=frozenset({"9.9.9.9:1"})), 1.0)
    for _ in range(3):
        router.on_scrape_failure(worker(0).endpoint)
    with pytest.raises(NoEndpointError, match="ready"):
        router.schedule(request(range(3)), 1.0)


def out_of_time(router, n, *began):
    """Its metrics page did not come in time, though it was connected to, as often as it takes."""
    for at in began or (1.0, 4.0, 7.0):
        router.on_page_failure(worker(n).endpoint, at, slow=True)


def end(router, decision, now, outcome=Outcome.FINISHED, **fields):
    completion = Completion(
        outcome, **{"served_by": decision.chosen.worker.endpoint, "status": 200, **fields}
    )
    return router.release(decision.lease_id, completion, now)


@pytest.mark.parametrize(
    ("fields", "believed"),
    [
        ({}, True),
        ({"served_by": None}, True),
        ({"status": 404}, False),
        ({"status": 503}, False),
        ({"status": None}, False),
        ({"outcome": Outcome.CANCELLED}, False),
        ({"outcome": Outcome.LOST}, False),
        ({"served_by": worker(1).endpoint}, False),
    ],
)
def test_a_request_that_was_served_well_proves_that_only_the_page_is_slow(fields, believed):
    router = make_router(2)
    only = frozenset({worker(0).endpoint})
    decision = router.schedule(request(PROMPT, subset=only), 0.0)
    out_of_time(router, 0)
    assert [c.worker for c in router.schedule(request(PROMPT), 9.0).candidates] == [worker(1)]
    end(router, decision, 9.5, **fields)
    candidates = router.schedule(request(PROMPT), 9.6).candidates
    assert {c.worker for c in candidates} == ({worker(0), worker(1)} if believed else {worker(1)})


@pytest.mark.parametrize("served_by", [worker(0).endpoint, None])
def test_where_the_gateway_chooses_it_has_to_say_who_served(served_by):
    router = make_router(1)
    observed = router.schedule(replace(request(PROMPT), mode=Mode.OBSERVE), 0.0)
    out_of_time(router, 0)
    end(router, observed, 9.5, served_by=served_by)
    assert router.table.is_ready(router.table.get(worker(0)), 9.6) == (served_by is not None)


def test_a_fleet_that_is_too_busy_for_its_metrics_pages_shares_the_requests():
    """None is ready; whose figures are old is not taken for idle, and our own requests count as ever."""
    router = make_router(3)
    for n in range(3):
        router.on_metrics(worker(n).endpoint, {0: metrics(running=4)}, 0.0)
        out_of_time(router, n)
    chosen = Counter(
        router.schedule(request(range(n * 1000, n * 1000 + 300)), 20.0).chosen.worker for n in range(30)
    )
    assert set(chosen) == {worker(0), worker(1), worker(2)}
    assert max(chosen.values()) - min(chosen.values()) <= 2
    router.on_metrics(worker(1).endpoint, {0: metrics()}, 21.0)
    again = router.schedule(request(range(90_000, 90_300)), 21.0)
    assert [c.worker for c in again.candidates] == [worker(1)]


def test_a_worker_kept_by_what_it_serves_is_as_busy_as_the_busiest():
    router = make_router(2)
    first = router.schedule(request(PROMPT, subset=frozenset({worker(0).endpoint})), 0.0)
    router.on_metrics(worker(0).endpoint, {0: metrics()}, 0.0)
    for now in (8.0, 9.0):
        router.on_metrics(worker(1).endpoint, {0: metrics(running=6, waiting=3)}, now)
    out_of_time(router, 0)
    end(router, first, 9.0)
    costs = {c.worker: c.cost for c in router.schedule(request(range(5000, 5300)), 9.5).candidates}
    assert costs[worker(0)].queue_ms == costs[worker(1)].queue_ms > 0


def test_who_serves_as_a_last_resort_does_so_among_many():
    router = make_router(40)
    slow = [n for n in range(40) if n % 2]
    for n in slow:
        out_of_time(router, n)
    assert router.schedule(request(PROMPT), 9.0).considered == 20
    subset = frozenset(worker(n).endpoint for n in slow)
    for _ in range(2):
        resort = router.schedule(request(PROMPT, subset=subset), 9.0)
        assert resort.considered == 20
        assert {c.worker.endpoint for c in resort.candidates} <= subset
        for n in range(0, 40, 2):
            out_of_time(router, n)


def with_adapter(adapter="law", **fields):
    return request(PROMPT, namespace=NAMESPACE._replace(adapter=adapter), **fields)


def test_those_that_have_an_adapter_serve_it_as_a_last_resort():
    """The others would say that there is no such model."""
    router = make_router(3)
    for n in range(3):
        router.on_models(worker(n).endpoint, None, ["law"] if n else [])
    out_of_time(router, 1)
    assert [c.worker for c in router.schedule(with_adapter(), 9.0).candidates] == [worker(2)]
    out_of_time(router, 2)
    found = router.schedule(with_adapter(), 9.0).candidates
    assert {c.worker for c in found} == {worker(1), worker(2)}
    only = frozenset({worker(2).endpoint})
    assert [c.worker for c in router.schedule(with_adapter(subset=only), 9.0).candidates] == [worker(2)]
    assert [c.worker for c in router.schedule(request(PROMPT), 9.0).candidates] == [worker(0)]
    # One that refuses connections is none, and an adapter that nobody has is for whoever is ready to refuse.
    for _ in range(3):
        router.on_scrape_failure(worker(1).endpoint)
    assert [c.worker for c in router.schedule(with_adapter(), 9.0).candidates] == [worker(2)]
    assert [c.worker for c in router.schedule(with_adapter("tax"), 9.0).candidates] == [worker(0)]


def test_nobody_who_may_serve_a_request_is_reached():
    router = make_router(3)
    for n in (0, 1):
        for _ in range(3):
            router.on_scrape_failure(worker(n).endpoint)
    subset = frozenset({worker(0).endpoint, worker(1).endpoint})
    with pytest.raises(NoEndpointError, match="none of the 2 workers of pool 'default' that may serve it"):
        router.schedule(request(PROMPT, subset=subset), 1.0)


def test_pitfall_57_no_load_is_charged_without_a_pick():
    router = make_router(1)
    with pytest.raises(NoEndpointError):
        router.schedule(request(PROMPT, subset=frozenset()), 1.0)
    assert len(router.ledger) == 0


def test_pitfall_56_what_expired_and_then_finishes_leaves_no_debt():
    router = make_router(2, lease_expiry_s=60.0)
    late = router.schedule(request(PROMPT), 1.0)
    assert len(router.tick(61.0)) == 1
    assert router.release(late.lease_id, DONE, 62.0) is None
    assert router.ledger.load(late.chosen.worker, 62.0) == IDLE
    # A debt would draw everything that follows to one worker.
    counts = Counter(
        router.schedule(request(range(n * 1000, n * 1000 + 100)), 63.0).chosen.worker for n in range(20)
    )
    assert sorted(counts.values()) == [10, 10]


def test_pitfall_65_routers_side_by_side_agree():
    """Nobody tells one router what another does; the session's hash, events and engines' metrics do."""
    by_hash = [make_router(4, policy="session-affinity", seed=n) for n in range(2)]
    for n in range(40):
        ask = request(range(50), session_key=f"session {n}")
        one, other = (router.schedule(ask, 1.0 + n) for router in by_hash)
        assert one.chosen.worker == other.chosen.worker
        for router, decision in zip(by_hash, (one, other), strict=True):
            router.release(decision.lease_id, DONE, 1.5 + n)
    by_cost = [make_router(4, seed=n) for n in range(2)]
    for router in by_cost:
        router.on_kv_events(worker(2), [stored(PROMPT)], 0.5)
    assert {router.schedule(request(PROMPT), 1.0).chosen.worker for router in by_cost} == {worker(2)}
    busy, watching = by_cost
    for n in range(6):  # a crowd that only one of them has sent there
        busy.schedule(request(range(n * 9000, n * 9000 + 4000), subset=frozenset({worker(2).endpoint})), 2.0)
    watching.on_metrics(worker(2).endpoint, {0: metrics(running=2, waiting=5)}, 2.5)
    for n in (0, 1, 3):
        watching.on_metrics(worker(n).endpoint, {0: metrics()}, 2.5)
    choices = [router.schedule(request(PROMPT), 2.6).chosen.worker for router in by_cost]
    assert worker(2) not in choices


def test_pitfall_67_where_a_prefix_was_sent_to_get_away_from_load_it_is_remembered():
    router = make_router(3, policy="prefix-affinity")
    for n in range(2):
        router.on_kv_events(worker(n), [stored(PROMPT)], 0.5)
    for n in range(16):
        only = frozenset({worker(n % 2).endpoint})
        router.schedule(request(range(n * 999, n * 999 + 60), subset=only), 1.0)
    first = router.schedule(request(PROMPT), 2.0)
    assert first.chosen.worker == worker(2)
    assert first.chosen.cached_tokens == 0
    router.release(first.lease_id, DONE, 3.0)
    again = router.schedule(request(PROMPT), 4.0)
    assert again.chosen.worker == worker(2)
    assert again.chosen.cached_tokens == (len(PROMPT) - 1) // BLOCK * BLOCK


def test_a_failed_worker_gets_nothing_until_it_is_back():
    router = make_router(2)
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.0)
    first = router.schedule(request(PROMPT), 1.0)
    failed = Completion(Outcome.FAILED, served_by=worker(0).endpoint)
    router.release(first.lease_id, failed, 1.5)
    assert router.schedule(request(PROMPT), 2.0).chosen.worker == worker(1)
    router.on_metrics(worker(0).endpoint, {0: metrics()}, 2.5)
    assert router.schedule(request(PROMPT), 3.0).chosen.worker == worker(0)


def test_a_retry_elsewhere_makes_the_first_choice_suspect():
    router = make_router(2)
    decision = router.schedule(request(PROMPT), 1.0)
    other = decision.candidates[1].worker
    router.release(decision.lease_id, Completion(Outcome.FINISHED, served_by=other.endpoint, attempts=2), 2.0)
    assert {router.schedule(request(range(n, n + 50)), 3.0).chosen.worker for n in range(5)} == {other}


def test_membership_changes_release_and_fence():
    router = make_router(1)
    decision = router.schedule(request(PROMPT), 1.0)
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.0)
    _, released = router.on_membership((), 2.0)
    assert (released, len(router.ledger)) == ([], 0)
    router.on_membership(members(1), 3.0)
    assert router.release(decision.lease_id, DONE, 4.0).completion is DONE
    assert router.release(decision.lease_id, DONE, 4.1) is None
    again = router.schedule(request(PROMPT), 5.0)
    assert again.chosen.cached_tokens == 0
    assert again.chosen.active == 0


def test_a_request_on_a_worker_that_left_is_lost_only_when_its_time_is_up():
    router = make_router(1, lease_expiry_s=60.0)
    decision = router.schedule(request(PROMPT), 1.0)
    router.on_membership((), 2.0)
    router.on_progress(decision.lease_id, 5, 30.0)
    assert router.tick(61.0) == []
    (lost,) = router.tick(90.0)
    assert (lost.lease.id, lost.completion.outcome) == (decision.lease_id, Outcome.LOST)
    assert router.tick(1e9) == []


def test_the_end_of_a_request_on_a_worker_that_left_teaches_how_long_answers_are():
    router = make_router(1)
    for n in range(40):
        decision = router.schedule(request(PROMPT, max_output=None), n)
        router.on_membership((), n + 0.1)
        router.release(decision.lease_id, Completion(Outcome.FINISHED, output_tokens=7), n + 0.2)
        router.on_membership(members(1), n + 0.3)
    assert router.schedule(request(PROMPT, max_output=None), 50.0).output.expected == pytest.approx(
        7, rel=0.3
    )


def test_a_lease_whose_log_entry_never_comes_expires():
    router = make_router(1, lease_expiry_s=60.0)
    router.schedule(request(PROMPT), 1.0)
    assert router.tick(60.0) == []
    assert [r.completion.outcome for r in router.tick(61.0)] == [Outcome.LOST]
    assert router.ledger.load(worker(0), 61.0) == IDLE
    assert router.tick(1e9) == []


def test_a_stream_end_releases_soon_only_when_no_access_log_can():
    router = make_router(1, stream_grace_s=5.0)
    router.on_access_log(is_open=True)
    a = router.schedule(request(PROMPT), 1.0)
    router.on_stream_ended(a.lease_id, 2.0)
    assert router.tick(20.0) == []
    router.on_access_log(is_open=False)
    b = router.schedule(request(PROMPT), 21.0)
    router.on_stream_ended(b.lease_id, 22.0)
    assert [r.lease.id for r in router.tick(27.0)] == [b.lease_id]


def test_a_lease_whose_ticket_may_not_have_left_waits_for_the_log_only_a_little():
    router = make_router(1, stream_grace_s=5.0)
    router.on_access_log(is_open=True)
    lost, logged = (router.schedule(request(PROMPT), 1.0).lease_id for _ in range(2))
    for lease_id in (lost, logged):
        router.on_stream_ended(lease_id, 2.0, undelivered=True)
    assert router.release(logged, DONE, 2.1).completion is DONE
    assert [r.lease.id for r in router.tick(7.0)] == [lost]


def test_counts_of_the_engine_release_what_it_does_not_have():
    router = make_router(1)
    router.schedule(request(PROMPT), 1.0)
    lost = [router.on_metrics(worker(0).endpoint, {0: metrics()}, t) for t in (5.0, 6.0, 7.0)]
    assert [len(x) for x in lost] == [0, 0, 1]
    assert len(router.ledger) == 0


def test_times_are_learned_from_streams_that_did_not_queue():
    router = make_router(1)
    for n in range(8):
        tokens = range(n * 10_000, n * 10_000 + 1000)
        decision = router.schedule(request(tokens, stream=True), float(n * 10))
        router.release(
            decision.lease_id,
            Completion(Outcome.FINISHED, upstream_first_body_ms=250.0, cached_tokens=0, output_tokens=5),
            n * 10 + 1.0,
        )
    fit = router.learned.ttft.of("default").coefficients(worker(0))
    assert fit.wait_ms(0) + fit.prefill_ms(1000, 0) == pytest.approx(250.0, rel=0.05)


def test_a_request_that_came_while_others_waited_for_a_grammar_teaches():
    router = make_router(1)
    for n in range(1, 9):
        at = n * 10.0
        router.on_metrics(worker(0).endpoint, {0: metrics(waiting=2, deferred=2)}, at - 0.5)
        decision = router.schedule(request(range(n * 10_000, n * 10_000 + 1000), stream=True), at)
        done = Completion(Outcome.FINISHED, upstream_first_body_ms=250.0, cached_tokens=0, output_tokens=5)
        router.release(decision.lease_id, done, at + 1.0)
    fit = router.learned.ttft.of("default").coefficients(worker(0))
    assert fit.wait_ms(0) + fit.prefill_ms(1000, 0) == pytest.approx(250.0, rel=0.05)


def first_token_ms(router):
    fit = router.learned.ttft.of("default").typical
    return fit.wait_ms(0) + fit.prefill_ms(1000, 0)


@pytest.mark.parametrize(("served_by", "had_first_token"), [(1, False), (0, False), (1, True)])
def test_what_a_retry_brings_to_a_worker_is_beside_those_that_are_there(served_by, had_first_token):
    """They wait for its prefill, unless it is over when it is told who serves it."""
    router = make_router(2)
    before = first_token_ms(router)
    here, there = (frozenset({worker(n).endpoint}) for n in (0, 1))
    for n in range(1, 9):
        at = n * 10.0
        alone, comes = (
            router.schedule(request(range(begin, begin + 1000), stream=True, subset=subset), at)
            for begin, subset in ((n * 10_000, there), (n * 10_000 + 5000, here))
        )
        if had_first_token:
            router.on_first_token(comes.lease_id, at + 0.05)
        router.on_served(comes.lease_id, worker(served_by).endpoint, at + 0.1)
        done = Completion(Outcome.FINISHED, upstream_first_body_ms=500.0, cached_tokens=0, output_tokens=5)
        router.release(alone.lease_id, done, at + 1.0)
        router.release(comes.lease_id, Completion(Outcome.CANCELLED), at + 1.0)
    if served_by == 1 and not had_first_token:
        assert first_token_ms(router) == before
    else:
        assert first_token_ms(router) == pytest.approx(500.0, rel=0.05) != before


@pytest.mark.parametrize("scraped_at", [-0.5, 0.1])
def test_what_a_request_waits_for_memory_is_not_learned_as_the_time_of_prefill(scraped_at):
    router = make_router(1)
    before = first_token_ms(router)
    for n in range(1, 9):
        at = n * 10.0
        done = Completion(Outcome.FINISHED, upstream_first_body_ms=4000.0, cached_tokens=0, output_tokens=5)
        if scraped_at < 0:
            router.on_metrics(worker(0).endpoint, {0: metrics(waiting=2, running=6)}, at + scraped_at)
        decision = router.schedule(request(range(n * 10_000, n * 10_000 + 1000), stream=True), at)
        if scraped_at > 0:
            router.on_metrics(worker(0).endpoint, {0: metrics(waiting=2, running=6)}, at + scraped_at)
        router.on_metrics(worker(0).endpoint, {0: metrics(waiting=0, running=0)}, at + 4.5)
        router.release(decision.lease_id, done, at + 5.0)
    assert first_token_ms(router) == before


def test_the_audit_compares_prediction_and_truth():
    router = make_router(1)
    decision = router.schedule(request(PROMPT), 1.0)
    released = router.release(decision.lease_id, Completion(Outcome.FINISHED, cached_tokens=0), 2.0)
    assert released.predicted_cached_tokens == 0
    assert released.prediction_was_exact is True
    load_only = router.schedule(request(prompt_tokens=50, load_only="not tokenized"), 3.0)
    released = router.release(load_only.lease_id, Completion(Outcome.FINISHED, cached_tokens=0), 4.0)
    assert released.prediction_was_exact is None


def test_data_parallel_ranks_are_separate_workers_behind_one_endpoint():
    router = make_router(0)
    router.on_membership([Member("h:1", dp_size=2)], 0.0)
    rank1 = Member("h:1", dp_size=2).workers()[1]
    router.on_kv_events(rank1, [stored(PROMPT)], 0.0)
    decision = router.schedule(request(PROMPT), 1.0)
    assert decision.chosen.worker == rank1
    assert router.destinations(decision, 3) == ("h:1",)


def test_salted_requests_do_not_meet_unsalted_blocks():
    router = make_router(1)
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.0)
    salted = request(PROMPT, namespace=request().namespace._replace(cache_salt="s"))
    assert router.schedule(salted, 1.0).chosen.cached_tokens == 0


def test_identical_inputs_and_seed_give_identical_decisions():
    def run():
        router = make_router(4, seed=9)
        out = []
        for n in range(60):
            decision = router.schedule(request(range(n % 7 * 100, n % 7 * 100 + 200)), n / 10)
            out.append(([c.worker for c in decision.candidates], decision.reason))
            if n % 3 == 0:
                router.release(decision.lease_id, DONE, n / 10 + 0.05)
        return out

    assert run() == run()


def test_hints_about_length_are_believed_within_the_limit():
    router = make_router(1)
    router.schedule(request(range(500), prompt_tokens=500), 1.0)
    costs = [
        router.schedule(
            request(range(n * 900, n * 900 + 50), max_output=limit, expected_output_tokens=hint), 1.0
        ).chosen.cost.decode_ms
        / (n + 1)
        for n, (hint, limit) in enumerate([(10, 5000), (150, 5000), (150, 10)])
    ]
    assert costs[0] < costs[1]
    assert costs[2] < costs[1]


def test_a_hint_of_absurdly_many_tokens_does_not_make_its_worker_look_full():
    router = make_router(1)
    ask = request(PROMPT, max_output=None, expected_output_tokens=(1 << 31) - 1)
    router.release(router.schedule(ask, 1.0).lease_id, DONE, 2.0)
    assert router.shares.utilization(worker(), 60.0) < 0.5


class RouterMachine(RuleBasedStateMachine):
    """Whatever happens: no reservation and no load outlives its request."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.router = make_router(3, lease_expiry_s=20.0)
        self.router.on_access_log(is_open=True)
        self.now = 0.0
        self.here = [True] * 3

    @rule(target=leases, prompt=st.integers(0, 3), length=st.integers(0, 100))
    def schedule(self, prompt, length):
        ask = request(range(prompt * 1000, prompt * 1000 + length))
        try:
            return self.router.schedule(ask, self.now).lease_id
        except NoEndpointError:
            return "none"

    @rule(step=st.floats(0, 8))
    def wait(self, step):
        self.now += step
        self.router.tick(self.now)

    @rule(lease=leases, outcome=st.sampled_from([Outcome.FINISHED, Outcome.CANCELLED, Outcome.FAILED]))
    def release(self, lease, outcome):
        self.router.release(lease, Completion(outcome), self.now)

    @rule(lease=leases)
    def first_token(self, lease):
        self.router.on_first_token(lease, self.now)

    @rule(lease=leases)
    def stream_ends(self, lease):
        self.router.on_stream_ended(lease, self.now)

    @rule(n=st.integers(0, 2))
    def flap(self, n):
        self.here[n] = not self.here[n]
        present = [m for m, here in zip(members(3), self.here, strict=True) if here]
        self.router.on_membership(present, self.now)

    @rule(n=st.integers(0, 2), prompt=st.integers(0, 3))
    def events(self, n, prompt):
        self.router.on_kv_events(
            worker(n),
            [stored(range(prompt * 1000, prompt * 1000 + 96), first_handle=prompt * 100)],
            self.now,
        )

    @rule(n=st.integers(0, 2), running=st.integers(0, 3))
    def scrape(self, n, running):
        self.router.on_metrics(worker(n).endpoint, {0: metrics(running=running)}, self.now)

    @rule(n=st.integers(0, 2))
    def reset(self, n):
        self.router.on_kv_reset(worker(n))

    @invariant()
    def nobody_absent_carries_load(self):
        for n in range(3):
            if not self.here[n]:
                assert self.router.ledger.load(worker(n), self.now) == IDLE

    def teardown(self):
        self.router.tick(self.now + 1000.0)
        assert len(self.router.ledger) == 0
        for n in range(3):
            self.router.on_kv_reset(worker(n))
        for prompt in range(4):
            assert self.router.index.match(hashes(range(prompt * 1000, prompt * 1000 + 100))) == []


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_worker_that_keeps_requests_waiting_for_memory_has_a_queue():
    router = make_router(2)
    for n in range(2):
        router.on_metrics(worker(n).endpoint, {0: metrics(waiting=0, running=0)}, 0.0)
    for n in range(6):
        router.schedule(request(range(n * 1000, n * 1000 + 50), subset=frozenset({worker(0).endpoint})), 1.0)
    waits = []
    for waiting in (0, 3):
        # Their prefill is over long since, so it is not what they wait for.
        router.on_metrics(worker(0).endpoint, {0: metrics(waiting=waiting, running=6 - waiting)}, 3.0)
        router.on_metrics(worker(1).endpoint, {0: metrics(waiting=0, running=0)}, 3.0)
        decision = router.schedule(request(range(90_000, 90_050)), 3.0)
        waits.append({c.worker: c.cost.queue_ms for c in decision.candidates})
        router.release(decision.lease_id, Completion(Outcome.CANCELLED), 3.0)
    assert waits[1][worker(0)] > waits[0][worker(0)] + 100.0
    assert waits[1][worker(1)] == waits[0][worker(1)]


def test_who_waited_at_the_last_scrape_waits_no_more_when_all_have_ended():
    router = make_router(2)
    mine = frozenset({worker(0).endpoint})
    decision = router.schedule(request(PROMPT, subset=mine), 1.0)
    # The engine could not begin with it at once: it compiled the grammar of an answer, say.
    router.on_metrics(worker(0).endpoint, {0: metrics(waiting=1, running=0)}, 3.0)
    assert router.table.get(worker(0)).stalled(1) == 1.0
    done = Completion(Outcome.FINISHED, cached_tokens=0, output_tokens=5)
    router.release(decision.lease_id, done, 3.2)
    costs = router.schedule(request(PROMPT, subset=mine), 3.3).chosen.cost
    fresh = make_router(2).schedule(request(PROMPT, subset=mine), 3.3).chosen.cost
    assert costs.queue_ms == fresh.queue_ms


def test_work_that_another_worker_would_not_have_is_charged_where_it_delays_others():
    def charged(held):
        router = make_router(2)
        if held:
            router.on_kv_events(worker(1), [stored(PROMPT)], 0.0)
        for n in range(4):
            ask = request(
                range(5000 + n * 1000, 5000 + n * 1000 + 50), subset=frozenset({worker(0).endpoint})
            )
            router.schedule(ask, 1.0)
        candidates = router.schedule(request(PROMPT), 3.0).candidates
        return next(c.cost.decode_ms for c in candidates if c.worker == worker(0))

    assert charged(held=True) > charged(held=False) + 10.0


def test_an_engines_counts_prove_nothing_while_ends_of_requests_are_still_to_be_told():
    router = make_router()
    lease = router.schedule(request(PROMPT), 1.0)
    there = lease.chosen.worker.endpoint
    for now in range(10, 20):
        assert router.on_metrics(there, {0: metrics(running=0, waiting=0)}, float(now), behind=True) == []
    lost = [router.on_metrics(there, {0: metrics(running=0, waiting=0)}, float(now)) for now in (20, 21, 22)]
    assert [len(found) for found in lost] == [0, 0, 1]


def test_the_adapters_of_an_only_rank_are_its_worker_s_whatever_its_number():
    router = make_router(1)
    worker = router.table.all()[0].id
    router.on_models(worker.endpoint, None, ["a", "b"])
    router.on_metrics(worker.endpoint, {3: EngineMetrics(adapters=("a",), max_adapters=1)}, 1.0)
    assert router.adapters.standing(worker, "a") is Standing.LOADED
    assert router.adapters.standing(worker, "b") is Standing.FULL
