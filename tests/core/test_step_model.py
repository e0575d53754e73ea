from random import Random

import pytest

from extproc.core.step_model import StepCoefficients, StepModel

PRIOR = StepCoefficients(10.0, 0.1, 0.02)


def test_the_prior_stands_until_there_are_samples():
    assert StepModel(PRIOR).coefficients.tpot_ms(10, 50_000) == pytest.approx(12.0)


def test_it_learns_what_sequences_and_context_cost():
    truth, model, rng = StepCoefficients(6.0, 0.05, 0.02), StepModel(PRIOR), Random(2)
    for _ in range(300):
        sequences, context = rng.randint(1, 60), rng.randint(0, 200_000)
        tpot = truth.tpot_ms(sequences, context) * rng.uniform(0.98, 1.02)
        model.observe(sequences=sequences, context_tokens=context, tpot_ms=tpot)
    fit = model.coefficients
    assert fit.per_sequence_ms == pytest.approx(0.05, rel=0.25)
    assert fit.per_1k_context_ms == pytest.approx(0.02, rel=0.25)
    assert fit.tpot_ms(30, 100_000) == pytest.approx(truth.tpot_ms(30, 100_000), rel=0.03)


def test_nonsense_teaches_nothing():
    model = StepModel(PRIOR)
    model.observe(sequences=3, context_tokens=0, tpot_ms=0.0)
    assert model.coefficients == PRIOR
