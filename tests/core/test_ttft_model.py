from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.ttft_model import TtftCoefficients, TtftModel, pairs
from tests.support.core import worker

PRIOR = TtftCoefficients(5.0, 0.1, 0.125, 0.0)
TRUTH = TtftCoefficients(14.0, 0.6, 0.1, 2.5)


def truth_ms(uncovered, cached, sequences, truth=TRUTH):
    return truth.wait_ms(sequences) + truth.prefill_ms(uncovered, cached)


def feed(model, count, *, seed=1, truth=TRUTH, workers=3, noise=0.0, odd=0.0):
    rng = Random(seed)
    for _ in range(count):
        uncovered, cached = rng.choice((5, 40, 300, 2000, 9000)), rng.choice((0, 500, 20_000, 90_000))
        sequences = rng.randint(0, 20)
        ttft = truth_ms(uncovered, cached, sequences, truth) * (1 + rng.uniform(-noise, noise))
        if rng.random() < odd:
            ttft *= 20
        model.observe(
            worker(rng.randrange(workers)),
            uncovered=uncovered,
            cached=cached,
            sequences=sequences,
            ttft_ms=ttft,
        )


def errors(model, truth=TRUTH, n=0):
    fit = model.coefficients(worker(n))
    for uncovered in (10, 500, 8000):
        for cached in (0, 10_000, 100_000):
            for sequences in (0, 10):
                true = truth_ms(uncovered, cached, sequences, truth)
                yield abs(fit.wait_ms(sequences) + fit.prefill_ms(uncovered, cached) - true) / true


def test_the_prior_stands_until_there_are_samples():
    fit = TtftModel(PRIOR).coefficients(worker(0))
    assert fit.prefill_ms(8000, 0) == pytest.approx(1000.0)
    assert fit.wait_ms(0) == pytest.approx(5.0)


def test_it_learns_all_four_coefficients():
    model = TtftModel(PRIOR)
    feed(model, 400)
    assert model.learned
    assert max(errors(model)) < 0.05


def test_noise_and_outliers_do_little():
    model = TtftModel(PRIOR)
    feed(model, 600, noise=0.1, odd=0.03)
    assert max(errors(model)) < 0.25


def test_it_follows_a_change():
    model = TtftModel(PRIOR)
    feed(model, 300)
    faster = TtftCoefficients(10.0, 0.3, 0.08, 1.5)
    feed(model, 600, truth=faster)
    assert max(errors(model, faster)) < 0.1


def test_a_clearly_slower_worker_gets_a_factor_and_equal_ones_none():
    model = TtftModel(PRIOR)
    rng = Random(3)
    for _ in range(600):
        n = rng.randrange(4)
        uncovered = rng.choice((40, 2000, 9000))
        ttft = truth_ms(uncovered, 0, 0) * (2.0 if n == 3 else 1.0) * rng.uniform(0.97, 1.03)
        model.observe(worker(n), uncovered=uncovered, cached=0, sequences=0, ttft_ms=ttft)
    equal = [model.coefficients(worker(n)) for n in range(3)]
    assert equal[0] == equal[1] == equal[2]
    assert model.coefficients(worker(3)).prefill_ms(5000, 0) > 1.4 * equal[0].prefill_ms(5000, 0)
    model.forget(worker(3))
    assert model.coefficients(worker(3)) == equal[0]


def test_attention_counts_what_lies_before():
    assert pairs(1000, 0) == pytest.approx(0.5)
    assert pairs(1000, 10_000) == pytest.approx(10.5)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-3, 10**5),
            st.integers(0, 10**6),
            st.integers(0, 500),
            st.floats(-1.0, 1e6, allow_nan=False),
        ),
        max_size=60,
    )
)
def test_whatever_it_is_fed_more_work_never_takes_less_time(samples):
    model = TtftModel(PRIOR)
    for uncovered, cached, sequences, ttft in samples:
        model.observe(worker(0), uncovered=uncovered, cached=cached, sequences=sequences, ttft_ms=ttft)
    fit = model.coefficients(worker(0))
    assert min(fit.overhead_ms, fit.per_sequence_ms, fit.per_token_ms, fit.per_mpair_ms) >= 0.0
    assert fit.prefill_ms(2000, 0) >= fit.prefill_ms(1000, 0)


def test_a_step_under_way_is_waited_for_once_however_many_are_in_it():
    model = TtftModel(PRIOR)
    for at in range(200):
        n = at % 5
        truth = 7.0 + (4.0 if n else 0.0) + 0.25 * n + 0.1 * (at % 7) * 100
        model.observe(worker(0), uncovered=at % 7 * 100, cached=0, sequences=n, ttft_ms=truth)
    fit = model.coefficients(worker(0))
    assert [fit.wait_ms(n) for n in (0, 1, 4)] == pytest.approx([7.0, 11.25, 12.0], rel=0.02)
