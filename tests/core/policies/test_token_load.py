from collections import Counter
from dataclasses import replace
from random import Random

from extproc.core.cost import CostSettings, RequestFacts
from extproc.core.policies import TokenLoad
from extproc.core.types import CostBreakdown, Priced, Reason
from tests.support.core import candidate, request, worker

POLICY = TokenLoad(CostSettings())
ASK = request(range(200))


def cost(total):
    return CostBreakdown(0.0, total, 0.0, 0.0)


def order(*candidates, seed=1):
    ordered, reason = POLICY.order(ASK, candidates, Random(seed))
    return [c.worker for c in ordered], reason


def test_the_cheapest_goes_first_and_all_are_ordered():
    ordered, _ = order(
        candidate(0, cost=cost(300.0)), candidate(1, cost=cost(100.0)), candidate(2, cost=cost(200.0))
    )
    assert ordered == [worker(1), worker(2), worker(0)]


def test_equal_candidates_are_chosen_by_chance_not_by_position():
    counts = Counter(
        POLICY.order(ASK, [candidate(n) for n in range(4)], Random(seed))[0][0].worker for seed in range(400)
    )
    assert set(counts) == {worker(n) for n in range(4)}
    assert max(counts.values()) < 150


def test_among_nearly_equal_ones_the_longer_hit_wins():
    warm = candidate(0, cached=160, uncovered=40, cost=cost(100.5))
    for seed in range(10):
        ordered, _ = order(candidate(1, cost=cost(100.0)), warm, seed=seed)
        assert ordered[0] == worker(0)


def test_reasons():
    assert order(candidate(0, cached=192, uncovered=8))[1] is Reason.WARM_EXACT
    assert order(candidate(0, cached=64, uncovered=136))[1] is Reason.WARM_PARTIAL
    assert order(candidate(0))[1] is Reason.COLD_IDLE
    assert order(candidate(0, active=2))[1] is Reason.COLD_BUSY
    assert POLICY.order(request(), [candidate(0)], Random(0))[1] is Reason.LOAD_ONLY


def test_the_same_seed_gives_the_same_order():
    candidates = [candidate(n) for n in range(8)]
    assert order(*candidates, seed=5) == order(*candidates, seed=5)


def timed(n, *, queue, prefill, cached=0, decode=0.0):
    return candidate(n, cached=cached, uncovered=40, cost=CostBreakdown(queue, prefill, decode, 0.0))


def bounded(*candidates, **settings):
    policy = TokenLoad(CostSettings(**settings))
    ordered, reason = policy.order(ASK, candidates, Random(1))
    return ordered[0].worker, reason


def test_a_warm_worker_may_be_worse_than_the_best_cold_one_by_the_bound_only():
    # The cold worker decodes so many that it is dearer in total, but its first token comes sooner.
    cold = timed(1, queue=0.0, prefill=500.0, decode=9000.0)
    assert bounded(timed(0, queue=1000.0, prefill=40.0, cached=160), cold, max_extra_ttft_ms=600.0) == (
        worker(0),
        Reason.WARM_PARTIAL,
    )
    assert bounded(timed(0, queue=1000.0, prefill=40.0, cached=160), cold, max_extra_ttft_ms=500.0) == (
        worker(1),
        Reason.WARM_DENIED_WAIT,
    )


def test_after_the_maximum_wait_warmth_no_longer_counts():
    cold = timed(1, queue=0.0, prefill=4000.0, decode=9000.0)
    warm = timed(0, queue=5000.0, prefill=40.0, cached=160)
    assert bounded(warm, cold, max_warm_wait_ms=6000.0)[0] == worker(0)
    assert bounded(warm, cold, max_warm_wait_ms=4500.0) == (worker(1), Reason.WARM_DENIED_WAIT)


def test_a_denied_worker_stays_a_fallback():
    cold, warm = (
        timed(1, queue=0.0, prefill=5.0, decode=9000.0),
        timed(0, queue=5000.0, prefill=4.0, cached=160),
    )
    ordered, _ = TokenLoad(CostSettings(max_extra_ttft_ms=100.0)).order(ASK, [warm, cold], Random(1))
    assert [c.worker for c in ordered] == [worker(1), worker(0)]


def test_with_only_warm_workers_there_is_no_bound_to_keep():
    assert bounded(timed(0, queue=90_000.0, prefill=1.0, cached=160))[0] == worker(0)


def test_short_answers_and_long_generations_have_bounds_of_their_own():
    cold = timed(1, queue=0.0, prefill=500.0, decode=9000.0)
    warm = timed(0, queue=1000.0, prefill=40.0, cached=160)

    def first(expected, **settings):
        both = [replace(c, priced=expecting(expected)) for c in (warm, cold)]
        policy = TokenLoad(CostSettings(long_output_tokens=400.0, **settings))
        return policy.order(ASK, both, Random(1))[0][0].worker

    patient = {"max_extra_ttft_ms": 300.0, "long_max_extra_ttft_ms": 600.0}
    assert first(399.0, **patient) == worker(1)
    assert first(400.0, **patient) == worker(0)
    hasty = {"long_max_warm_wait_ms": 900.0}
    assert first(399.0, **hasty) == worker(0)
    assert first(400.0, **hasty) == worker(1)
    # Bounds that are not set apart are those of short answers.
    assert first(400.0, max_extra_ttft_ms=300.0) == worker(1)
    assert first(400.0, max_warm_wait_ms=900.0) == worker(1)


def expecting(output):
    return Priced(RequestFacts(200, 40, 160, 0, output, 1), None)
