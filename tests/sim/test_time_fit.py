import random

import pytest

from extproc.sim.time_fit import (
    FittedTime,
    Observation,
    TimeFitError,
    Work,
    decode_work,
    first_token_work,
    fit,
)
from extproc.sim.time_model import TimeModel

TRUE = FittedTime(TimeModel(5.0, 0.03, 3e-6, 0.4, 2e-4), request_ms=3.0, request_ms_per_token=4e-4)
DESIGN = [
    *(first_token_work(n, 0, 1024) for n in (32, 128, 512, 1024, 2048, 3000, 4096, 8000)),
    *(first_token_work(n, c, 1024) for n, c in ((600, 512), (4000, 3072), (8000, 7936), (8000, 4096))),
    *(decode_work([context] * n) for n in (1, 4, 8) for context in (64, 1000)),
]


def test_exact_times_give_the_coefficients_back() -> None:
    found = fit(Observation(work, TRUE.predict_ms(work)) for work in DESIGN)
    assert found.request_ms == pytest.approx(3.0, rel=1e-6)
    assert found.request_ms_per_token == pytest.approx(4e-4, rel=1e-6)
    for name in ("base_ms", "prefill_ms_per_token", "attention_ms_per_pair", "decode_ms_per_sequence"):
        assert getattr(found.time, name) == pytest.approx(getattr(TRUE.time, name), rel=1e-6)
    assert found.time.context_ms_per_token == pytest.approx(2e-4, rel=1e-6)


def test_noise_of_ten_percent_leaves_predictions_near() -> None:
    rng = random.Random(5)
    noisy = [Observation(w, TRUE.predict_ms(w) * rng.uniform(0.9, 1.1)) for w in DESIGN for _ in range(5)]
    found = fit(noisy)
    for prompt, cached in ((100, 0), (5000, 0), (5000, 4800), (2500, 1024)):
        work = first_token_work(prompt, cached, 1024)
        assert found.predict_ms(work) == pytest.approx(TRUE.predict_ms(work), rel=0.1)


def test_what_costs_nothing_is_fitted_as_zero_and_never_below() -> None:
    free = FittedTime(TimeModel(5.0, 0.03, 0.0, 0.0, 0.0), 0.0, 0.0)
    rng = random.Random(1)
    found = fit(Observation(w, free.predict_ms(w) * rng.uniform(0.98, 1.02)) for w in DESIGN)
    assert found.request_ms >= 0
    assert 0 <= found.time.attention_ms_per_pair < 5e-7
    assert found.time.prefill_ms_per_token == pytest.approx(0.03, rel=0.1)


def test_work_until_the_first_token_counts_steps_and_pairs() -> None:
    assert first_token_work(10, 0, 4) == Work(1, 10, 3, 10, 45)
    assert first_token_work(10, 8, 4) == Work(1, 10, 1, 2, 17)
    assert decode_work([5, 7]) == Work(steps=1, decodes=2, context_tokens=12)


def test_the_pairs_are_those_the_engine_model_counts() -> None:
    # Chunks of 4: each adds n * computed + n * (n - 1) / 2.
    chunks = [(4, 0), (4, 4), (2, 8)]
    assert first_token_work(10, 0, 4).prefill_pairs == sum(n * p + n * (n - 1) / 2 for n, p in chunks)


def test_bad_observations_are_refused() -> None:
    with pytest.raises(TimeFitError, match="context_tokens"):
        fit([Observation(first_token_work(10, 0, 4), 1.0)] * 9)
    with pytest.raises(TimeFitError, match="took no time"):
        fit([Observation(decode_work([5]), 0.0)])
    same = [first_token_work(10, 0, 4), decode_work([5, 7])]
    with pytest.raises(TimeFitError, match="do not determine"):
        fit([Observation(work, 1.0) for work in same] * 9)
    with pytest.raises(ValueError, match="at least 1"):
        first_token_work(8, 8, 4)
