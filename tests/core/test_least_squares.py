from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.least_squares import OnlineFit, non_negative

EXAMPLES = ((1.0, 0.0), (1.0, 10.0))


def test_the_prior_stands_until_there_are_samples():
    assert OnlineFit((3.0, 2.0), EXAMPLES).predict((1.0, 5.0)) == pytest.approx(13.0)


def test_it_finds_the_line():
    fit = OnlineFit((3.0, 2.0), EXAMPLES)
    for x in range(100):
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


def test_times_of_nearly_nothing_do_not_draw_the_first_fits():
    """A quarter of what is measured: tokens that an engine was late to send come all at once."""
    fit, rng = OnlineFit((10.0, 0.1), EXAMPLES), Random(1)
    for at in range(60):
        x = float(rng.randrange(12))
        fit.observe((1.0, x), 0.2 if at % 4 == 1 else 12.0 + 0.5 * x)
        if at >= 5:
            assert fit.predict((1.0, 6.0)) == pytest.approx(15.0, rel=0.2), at


def test_the_first_fits_of_what_is_spread_widely_lie_in_its_middle():
    ratios = []
    for seed in range(20):
        fit, rng = OnlineFit((10.0, 0.1), EXAMPLES), Random(seed)
        for _ in range(15):
            x = rng.uniform(500.0, 1500.0)
            fit.observe((1.0, x), (20.0 + 0.25 * x) * rng.lognormvariate(0.0, 0.8))
        ratios.append(fit.predict((1.0, 1000.0)) / 270.0)
    assert 0.8 < median(ratios) < 1.3


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_a_prior_that_is_far_off_is_outvoted(factor):
    fit = OnlineFit((7.0 * factor, 0.5 * factor), EXAMPLES)
    for x in range(20):
        fit.observe((1.0, float(x % 12)), 7.0 + 0.5 * (x % 12))
    assert fit.settled
    assert fit.predict((1.0, 6.0)) == pytest.approx(10.0, rel=0.15)


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
