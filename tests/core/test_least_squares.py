from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.least_squares import OnlineFit, non_negative

EXAMPLES = ((1.0, 0.0), (1.0, 10.0))


def test_the_prior_stands_until_there_are_samples():
    assert OnlineFit((3.0, 2.0), EXAMPLES).predict((1.0, 5.0)) == pytest.approx(13.0)


def test_it_finds_the_line():
    fit = OnlineFit((3.0, 2.0), EXAMPLES)
    for x in range(60):
        fit.observe((1.0, float(x % 12)), 7.0 + 0.5 * (x % 12))
    assert fit.settled
    assert fit.coefficients == pytest.approx((7.0, 0.5), rel=0.02)


def test_small_values_matter_as_much_as_large_ones():
    fit, rng = OnlineFit((1.0, 1.0), EXAMPLES), Random(1)
    for _ in range(300):
        x = rng.choice((0.0, 10_000.0))
        fit.observe((1.0, x), (4.0 + 0.1 * x) * rng.uniform(0.9, 1.1))
    assert fit.predict((1.0, 0.0)) == pytest.approx(4.0, rel=0.1)
    assert fit.predict((1.0, 10_000.0)) == pytest.approx(1004.0, rel=0.1)


def test_an_outlier_moves_a_settled_fit_little():
    fit = OnlineFit((1.0, 1.0), EXAMPLES)
    for x in range(100):
        fit.observe((1.0, float(x % 10)), 5.0 + x % 10)
    before = fit.predict((1.0, 5.0))
    fit.observe((1.0, 5.0), 5000.0)
    assert fit.predict((1.0, 5.0)) == pytest.approx(before, rel=0.05)


@given(
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(1e-3, 1e7)), min_size=1, max_size=40)
)
def test_no_coefficient_is_ever_negative(samples):
    fit = OnlineFit((1.0, 1.0, 1.0), ((1.0, 0.0, 0.0), (1.0, 9.0, 0.0), (1.0, 0.0, 9.0)))
    for a, b, value in samples:
        fit.observe((1.0, a, b), value)
        assert min(fit.coefficients) >= 0.0


def test_a_singular_system_has_a_solution():
    assert non_negative([[1.0, 1.0], [1.0, 1.0]], [2.0, 2.0]) == pytest.approx([1.0, 1.0], abs=1.1)
    assert non_negative([[0.0]], [0.0]) == [0.0]
