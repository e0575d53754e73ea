from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.cost import RequestFacts, WorkerFacts
from extproc.core.engine_shares import MAX_PREFIXES, MEMORY_S, EngineShares, kind_of, work_of
from extproc.core.step_model import StepCoefficients
from extproc.core.ttft_model import TtftCoefficients
from extproc.core.types import Priced, ShareFacts
from tests.support.core import candidate, decision, worker

CHAIN = tuple(range(100, 120))  # of a prompt of 325 tokens


def routed(n=0, *, prefill_ms=1000.0, warm=True, prefix=7, cached=100):
    made = decision("a", n, prefill_ms=prefill_ms)
    chosen = replace(made.chosen, cached_tokens=cached, shares=ShareFacts(warm=warm, prefix=prefix))
    return replace(made, candidates=(chosen,))


def test_work_is_prefill_and_what_is_added_to_each_step():
    facts = WorkerFacts(
        TtftCoefficients(0.0, 0.0, 1.0, 0.0), 0.0, 0.0, 0, 0, 0, None, StepCoefficients(10.0, 0.5, 2.0)
    )
    one = replace(candidate(0, uncovered=40), priced=Priced(RequestFacts(900, 40, 860, 0, 200.0, 2), facts))
    assert work_of(one) == pytest.approx(40 + 2 * 200 * (0.5 + 2.0 * 1.0))


def test_shares_are_of_the_workers_time_and_fade():
    shares = EngineShares()
    for n in range(3):
        shares.book(routed(), float(n) / 1e6)
    assert shares.prefix(worker(0), 7, 0.0) == pytest.approx(3 * 1000.0 / (MEMORY_S * 1000.0), rel=1e-3)
    assert shares.warm(worker(0), 0.0) == shares.prefix(worker(0), 7, 0.0)
    assert shares.prefix(worker(0), 8, 0.0) == 0.0
    assert shares.prefix(worker(1), 7, 0.0) == 0.0
    assert shares.prefix(worker(0), 7, MEMORY_S) == pytest.approx(0.3 / 2.71828, rel=1e-3)


def test_a_prefix_that_takes_half_of_the_time_has_half():
    shares = EngineShares()
    for n in range(2000):
        shares.book(routed(prefill_ms=50.0), n * 0.1)
    assert shares.prefix(worker(0), 7, 200.0) == pytest.approx(0.5, rel=0.02)


def test_cold_requests_are_counted_by_pool_and_are_no_prefix():
    shares = EngineShares()
    shares.book(routed(warm=False, prefix=None), 0.0)
    shares.book(routed(warm=None, prefix=None), 0.0)  # routed by load: not known what it is
    assert shares.cold("default", 0.0) == pytest.approx(0.1)
    assert shares.cold("other", 0.0) == 0.0
    assert shares.warm(worker(0), 0.0) == 0.0
    assert shares.cold_prefill(worker(0), 0.0) == pytest.approx(0.1)


def test_the_prefill_of_a_copy_does_not_count_against_it():
    shares = EngineShares()
    shares.book(routed(cached=0, prefill_ms=9000.0), 0.0)
    assert shares.prefix(worker(0), 7, 0.0) == 0.0
    shares.book(routed(cached=50, prefill_ms=900.0), 0.0)
    assert shares.prefix(worker(0), 7, 0.0) == pytest.approx(0.09)


def test_memory_is_bounded_and_who_left_has_no_share():
    shares = EngineShares()
    for n in range(3 * MAX_PREFIXES):
        shares.book(routed(prefix=n), 0.0)
    assert shares.prefix(worker(0), 3 * MAX_PREFIXES - 1, 0.0) > 0.0
    assert shares.prefix(worker(0), 0, 0.0) == 0.0
    assert sum(shares.prefix(worker(0), n, 0.0) > 0.0 for n in range(3 * MAX_PREFIXES)) == MAX_PREFIXES
    shares.forget(worker(0))
    assert shares.warm(worker(0), 0.0) == 0.0


def kind(held, prompt_tokens=325, chains=None):
    sizes = dict.fromkeys(held, 16)
    return kind_of(prompt_tokens, held, sizes, {16: (CHAIN,)} if chains is None else chains)


def test_the_prefix_is_the_longest_anybody_holds():
    assert kind({worker(0): 160, worker(1): 320}) == ShareFacts(warm=True, prefix=CHAIN[19])
    # The same system prompt, but each session's own history behind it: prefixes of their own.
    assert kind({worker(0): 192}).prefix == CHAIN[11]


def test_what_is_shared_must_be_most_of_the_prompt():
    assert kind({worker(0): 160}) == ShareFacts(warm=False)
    assert kind({}) == ShareFacts(warm=False)
    assert kind({worker(0): 176}).warm is True


def test_what_is_not_known_is_neither_warm_nor_cold():
    assert kind({}, chains={}) == ShareFacts()


def test_a_batch_is_warm_and_no_prefix():
    assert kind({worker(0): 600}, 650, {16: (CHAIN, CHAIN)}) == ShareFacts(warm=True, prefix=None)


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 3), st.integers(0, 2)), max_size=40))
def test_shares_are_sums_that_add_up(booked):
    shares, now = EngineShares(), 0.0
    for prefill_ms, pause, prefix in booked:
        now += pause
        shares.book(routed(prefill_ms=prefill_ms, prefix=prefix), now)
    parts = [shares.prefix(worker(0), prefix, now) for prefix in range(3)]
    assert sum(parts) == pytest.approx(shares.warm(worker(0), now))
    assert min(parts) >= 0.0


def test_how_busy_a_worker_is_counts_all_its_requests():
    shares = EngineShares()
    assert shares.utilization(worker(0), 0.0) == 0.0
    for n in range(4000):
        shares.book(routed(prefill_ms=25.0, warm=n % 2 == 0, prefix=None), n * 0.05)
    assert shares.utilization(worker(0), 200.0) == pytest.approx(0.5, rel=0.02)
    assert shares.utilization(worker(1), 200.0) == 0.0
    assert shares.utilization(worker(0), 300.0) < 0.001


def test_how_busy_a_worker_is_shows_in_its_first_seconds():
    shares = EngineShares()
    for n in range(20):
        shares.book(routed(prefill_ms=50.0), n * 0.1)
    assert shares.utilization(worker(0), 2.0) == pytest.approx(0.5, rel=0.1)
