from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.cost import CostSettings
from extproc.core.share_bounds import COLD_SLACK_MS, bounded, is_full
from extproc.core.types import CostBreakdown, Reason, ShareFacts
from tests.support.core import candidate, worker

SETTINGS = CostSettings(max_prefix_share=0.5, cold_share=0.2)


def one(n, *, held=0, queue=0.0, prefill=100.0, warm=True, **shares):
    made = candidate(n, cached=held, cost=CostBreakdown(queue, prefill, 0.0, 0.0))
    return replace(made, shares=ShareFacts(warm=warm, **shares))


def order(*candidates, settings=SETTINGS, reason=Reason.WARM_EXACT):
    ordered, why = bounded(candidates, reason, settings)
    assert sorted(c.worker for c in ordered) == sorted(c.worker for c in candidates)
    return [int(c.worker.endpoint.split(".")[3].split(":")[0]) for c in ordered], why


def test_within_its_share_a_prefix_stays():
    assert order(one(0, held=160, prefix_share=0.49), one(1)) == ([0, 1], Reason.WARM_EXACT)


def test_a_prefix_that_has_had_enough_of_a_worker_gets_another_copy():
    assert order(one(0, held=160, prefix_share=0.5), one(1), one(2)) == (
        [1, 2, 0],
        Reason.WARM_DENIED_SHARE,
    )


def test_another_holder_goes_before_a_new_copy():
    hot, copy, cheaper = one(0, held=160, prefix_share=0.9), one(1, held=160, queue=90.0, prefill=1.0), one(2)
    assert order(hot, cheaper, copy)[0] == [1, 2, 0]
    # One that holds only a little of it is no holder.
    assert order(hot, cheaper, replace(copy, cached_tokens=64))[0] == [2, 1, 0]


def test_while_one_copy_is_computed_no_second_one_is_made():
    hot = one(0, held=160, prefill=1.0, prefix_share=0.9)
    on_its_way = one(1, held=160, queue=100.0, prefill=1.0)
    assert order(hot, one(2), on_its_way)[0][0] == 1


def test_workers_that_are_busier_by_more_than_a_copy_get_none():
    hot = one(0, held=160, queue=50.0, prefill=1.0, prefix_share=0.9)
    assert order(hot, one(1, queue=151.0), one(2, queue=9000.0)) == ([0, 1, 2], Reason.WARM_EXACT)
    assert order(hot, one(1, queue=149.0), one(2, queue=9000.0))[0] == [1, 2, 0]


def test_with_every_worker_full_nothing_is_denied():
    both = [one(n, held=160, prefix_share=0.9) for n in range(2)]
    assert order(*both) == ([0, 1], Reason.WARM_EXACT)


def test_a_bound_of_one_is_none():
    free = CostSettings(max_prefix_share=1.0, cold_share=0.0)
    assert order(one(0, held=160, prefix_share=3.0, warm_share=3.0, cold_demand=1.0), one(1), settings=free)[
        0
    ] == [0, 1]


@pytest.mark.parametrize(
    ("warm_share", "cold_demand", "full"),
    [(0.85, 0.5, True), (0.79, 0.5, False), (0.85, 0.1, False), (0.92, 0.1, True), (5.0, 0.0, False)],
)
def test_warm_requests_leave_what_cold_ones_ask_for_up_to_the_cold_share(warm_share, cold_demand, full):
    assert is_full(one(0, warm_share=warm_share, cold_demand=cold_demand), SETTINGS) is full


def cold(n, ttft, **shares):
    return one(n, queue=ttft, prefill=0.0, warm=False, **shares)


def test_a_cold_request_does_not_queue_for_the_sake_of_others():
    spared = cold(0, 1000.0)
    latest = SETTINGS.max_cold_slowdown * 400.0 + COLD_SLACK_MS
    assert order(spared, cold(1, latest), cold(2, 400.0), cold(3, latest + 1)) == (
        [1, 2, 0, 3],
        Reason.WARM_EXACT,
    )
    assert order(cold(0, latest), cold(1, 400.0))[0] == [0, 1]


def test_what_is_kept_for_cold_requests_can_be_used_up():
    spared, soon = cold(0, 1000.0), cold(1, 400.0, cold_prefill=SETTINGS.cold_share)
    assert order(spared, soon)[0] == [0, 1]
    assert order(spared, soon, cold(2, 410.0))[0] == [2, 0, 1]
    nothing = CostSettings(cold_share=0.0)
    assert order(spared, cold(1, 400.0), settings=nothing)[0] == [0, 1]


def test_a_warm_request_may_queue_where_its_prefix_is():
    assert order(one(0, held=160, queue=9000.0), one(1))[0] == [0, 1]


def test_a_cold_request_is_never_denied():
    full = one(0, warm=False, warm_share=0.99, cold_demand=1.0)
    assert order(full, one(1, warm=False), reason=Reason.COLD_BUSY) == ([0, 1], Reason.COLD_BUSY)


def test_the_cold_pool_serves_cold_requests_only():
    pool, other = one(0, cold_only=True), one(1)
    assert order(pool, other)[0] == [1, 0]
    both = [replace(c, shares=c.shares._replace(warm=False)) for c in (pool, other)]
    assert order(*both, reason=Reason.COLD_IDLE) == ([0, 1], Reason.COLD_POOL)
    assert order(*reversed(both), reason=Reason.COLD_IDLE) == ([1, 0], Reason.COLD_IDLE)


def test_if_nobody_else_is_ready_the_cold_pool_serves_all():
    assert order(one(0, cold_only=True), one(1, cold_only=True))[0] == [0, 1]


def test_a_request_routed_by_load_may_go_anywhere():
    unknown = one(0, warm=None, cold_only=True)
    assert order(unknown, one(1, warm=None), reason=Reason.LOAD_ONLY) == ([0, 1], Reason.LOAD_ONLY)


def test_a_hot_prefix_is_not_copied_into_the_cold_pool():
    hot = one(0, held=160, prefix_share=0.9)
    assert order(hot, one(1, cold_only=True))[0] == [0, 1]
    assert order(hot, one(1, cold_only=True), one(2))[0] == [2, 0, 1]


facts = st.builds(
    lambda held, queue, prefill, prefix_share, warm_share, cold_only: {
        "held": held, "queue": queue, "prefill": prefill, "prefix_share": prefix_share,
        "warm_share": warm_share, "cold_only": cold_only,
    },
    st.sampled_from((0, 64, 160)), st.floats(0, 300), st.floats(0, 200), st.floats(0, 2), st.floats(0, 2),
    st.booleans(),
)  # fmt: skip


@given(st.lists(facts, min_size=1, max_size=6), st.booleans(), st.floats(0, 1))
def test_nobody_is_lost_and_a_denial_goes_to_who_has_room(all_facts, warm, cold_demand):
    candidates = [one(n, warm=warm, cold_demand=cold_demand, **each) for n, each in enumerate(all_facts)]
    ordered, reason = bounded(candidates, Reason.WARM_PARTIAL, SETTINGS)
    assert {c.worker for c in ordered} == {worker(n) for n in range(len(candidates))}
    if reason is Reason.WARM_DENIED_SHARE:
        assert warm
        assert not is_full(ordered[0], SETTINGS)
    if warm and any(not c.shares.cold_only for c in candidates):
        assert not ordered[0].shares.cold_only
    if not warm:
        first = min(c.cost.ttft_ms for c in candidates)
        latest = SETTINGS.max_cold_slowdown * first + COLD_SLACK_MS
        assert ordered[0].cost.ttft_ms <= latest  # no share of it is used up here
