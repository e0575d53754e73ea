from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.cost import CostSettings, RequestFacts, WorkerFacts, price
from extproc.core.step_model import StepCoefficients
from extproc.core.ttft_model import TtftCoefficients

SETTINGS = CostSettings()
TTFT = TtftCoefficients(0.0, 0.0, 1.0, 0.0)  # 1,000 tokens a second


def worker(**fields):
    defaults = {
        "ttft": TTFT,
        "queued_prefill_ms": 0.0,
        "foreign_waiting": 0.0,
        "sequences": 0,
        "context_tokens": 0,
        "held_tokens": 0,
        "capacity_tokens": None,
        "step": StepCoefficients(10.0, 0.1, 0.02),
    }
    return WorkerFacts(**{**defaults, **fields})


def request(prompt=1000, uncovered=1000, offloaded=0, output=100.0, sequences=1):
    return RequestFacts(prompt, uncovered, prompt - uncovered - offloaded, offloaded, output, sequences)


def test_an_idle_worker_costs_its_prefill():
    cost = price(request(uncovered=500), worker(), CostSettings(interference=0.0))
    assert cost.total_ms == cost.ttft_ms == pytest.approx(500.0)


def test_at_equal_wait_the_worker_that_computes_less_is_cheaper():
    warm_request = replace(request(uncovered=10), most_cached_tokens=990)
    cold_request = replace(warm_request, uncovered_tokens=500, cached_tokens=500)
    warm = price(warm_request, worker(queued_prefill_ms=490.0, sequences=4), SETTINGS)
    cold = price(cold_request, worker(sequences=4), SETTINGS)
    assert warm.ttft_ms == pytest.approx(cold.ttft_ms)
    # Four sequences are half a crowd, and 490 ms of prefill are done twice.
    assert cold.total_ms - warm.total_ms == pytest.approx(SETTINGS.interference * 0.5 * 490.0)


def test_computing_again_is_free_where_nobody_is_delayed_or_where_many_will_use_it():
    asked = replace(request(uncovered=1000), most_cached_tokens=990)
    assert price(asked, worker(), SETTINGS).decode_ms == 0.0
    crowded = worker(sequences=12, beside=0.0)
    rare = price(asked, crowded, SETTINGS).decode_ms
    wanted = price(replace(asked, prefix_share=SETTINGS.max_prefix_share / 2), crowded, SETTINGS).decode_ms
    assert rare == pytest.approx(SETTINGS.interference * 0.75 * 990.0)
    assert wanted == pytest.approx(rare / 2)
    assert price(replace(asked, prefix_share=0.9), crowded, SETTINGS).decode_ms == 0.0


def test_who_waits_for_memory_waits_until_one_that_runs_has_ended():
    step = StepCoefficients(10.0, 0.1, 0.02)
    full = worker(sequences=20, context_tokens=50_000, stalled=0.25, step=step)
    took_ms = 100.0 * step.tpot_ms(20, 50_000)
    assert price(request(), full, SETTINGS).queue_ms == pytest.approx(0.25 * took_ms)


def test_slower_decoding_weighs_less_than_waiting():
    busy = worker(sequences=4, context_tokens=8000)
    whole = price(request(), busy, replace(SETTINGS, decode_weight=1.0)).decode_ms
    assert price(request(), busy, SETTINGS).decode_ms == pytest.approx(SETTINGS.decode_weight * whole)


def test_each_cause_lands_in_its_own_term():
    cost = price(request(), worker(queued_prefill_ms=70.0), SETTINGS)
    assert cost.queue_ms == 70.0
    assert price(request(), worker(foreign_waiting=2.0), SETTINGS).queue_ms == pytest.approx(2000.0)
    busy = price(request(), worker(sequences=4), SETTINGS)
    assert busy.decode_ms > 0.0
    assert busy.kv_risk_ms == 0.0
    assert price(request(), worker(capacity_tokens=600), SETTINGS).kv_risk_ms == pytest.approx(500.0)


def test_attention_makes_a_long_context_dearer_per_token():
    growing = worker(ttft=replace(TTFT, per_mpair_ms=2.0))
    short = price(request(prompt=1000, uncovered=1000), growing, SETTINGS).prefill_ms
    long = price(request(prompt=100_000, uncovered=1000), growing, SETTINGS).prefill_ms
    assert long > short


def test_the_step_it_waits_for_is_part_of_the_queue():
    waiting = worker(ttft=TtftCoefficients(12.0, 0.5, 1.0, 0.0), sequences=10)
    assert price(request(), waiting, SETTINGS).queue_ms == pytest.approx(17.0)


def test_offloaded_blocks_cost_less_than_computing_and_more_than_nothing():
    computed = price(request(uncovered=1000), worker(), SETTINGS).prefill_ms
    loaded = price(request(uncovered=0, offloaded=1000), worker(), SETTINGS).prefill_ms
    assert 0.0 < loaded < computed


workers = st.builds(
    WorkerFacts,
    ttft=st.builds(
        TtftCoefficients, st.floats(0, 100), st.floats(0, 5), st.floats(0.01, 100), st.floats(0, 10)
    ),
    queued_prefill_ms=st.floats(0, 1e5),
    foreign_waiting=st.floats(0, 100),
    sequences=st.integers(0, 500),
    context_tokens=st.integers(0, 10**6),
    held_tokens=st.integers(0, 10**6),
    capacity_tokens=st.none() | st.integers(1, 10**6),
    step=st.builds(StepCoefficients, st.floats(0, 100), st.floats(0, 5), st.floats(0, 5)),
    stalled=st.floats(0, 10),
)


@given(
    workers,
    st.integers(0, 10**5),
    st.floats(0, 1e4),
    st.sampled_from(
        ["queued_prefill_ms", "foreign_waiting", "sequences", "context_tokens", "held_tokens", "stalled"]
    ),
    st.integers(1, 100),
)
def test_more_load_never_makes_a_worker_cheaper(facts, uncovered, output, name, more):
    loaded = replace(facts, **{name: getattr(facts, name) + more})
    ask = request(10**5, uncovered, 0, output)
    assert price(ask, loaded, SETTINGS).total_ms >= price(ask, facts, SETTINGS).total_ms


@given(workers, st.integers(0, 10**5), st.integers(0, 10**5))
def test_a_longer_overlap_never_makes_a_worker_dearer(facts, a, b):
    less, more = sorted((a, b))
    cheap = price(request(10**5, less), facts, SETTINGS)
    assert cheap.total_ms <= price(request(10**5, more), facts, SETTINGS).total_ms


def test_who_evicts_warm_prefixes_pays_for_them():
    full = worker(capacity_tokens=100_000, unused_tokens=0, reuse=0.5)
    roomy = worker(capacity_tokens=100_000, unused_tokens=50_000, reuse=0.5)
    cold = request(uncovered=1000, output=0.0)
    assert price(cold, roomy, SETTINGS).kv_risk_ms == 0.0
    assert price(cold, full, SETTINGS).kv_risk_ms == pytest.approx(500.0)
    assert price(cold, replace(full, reuse=0.0), SETTINGS).kv_risk_ms == 0.0
    assert price(request(uncovered=10, output=0.0), full, SETTINGS).kv_risk_ms == pytest.approx(5.0)


def test_who_is_in_the_queue_is_in_no_step_yet():
    waiting = worker(ttft=TtftCoefficients(12.0, 0.5, 1.0, 0.0, busy_ms=4.0), sequences=10, prefilling=10)
    assert price(request(), waiting, SETTINGS).queue_ms == pytest.approx(12.0)
    some = replace(waiting, prefilling=8)
    assert price(request(), some, SETTINGS).queue_ms == pytest.approx(12.0 + 4.0 + 2 * 0.5)


@pytest.mark.parametrize(("taken", "delayed"), [(0.0, 0.0), (0.2, 0.25), (0.5, 1.0), (1.0, 1.0)])
def test_computing_again_on_an_idle_worker_delays_those_who_come_meanwhile(taken, delayed):
    asked, there = replace(request(), most_cached_tokens=990), worker(sequences=0, utilization=taken)
    cost = price(asked, there, SETTINGS)
    assert cost.decode_ms == pytest.approx(delayed * 990.0)
    free = price(asked, there, replace(SETTINGS, idle_interference=0.0))
    assert free.decode_ms == 0.0


def test_on_a_crowded_worker_those_who_are_there_count_not_those_who_come():
    quiet, busy = (
        price(replace(request(), most_cached_tokens=990), worker(sequences=4, utilization=taken), SETTINGS)
        for taken in (0.0, 0.9)
    )
    assert quiet == busy
