from random import Random

import pytest

from extproc.sim.workloads.sampling import Quantiles

POINTS = ((0, 10), (0.5, 100), (1, 1000))


def test_draws_have_the_quantiles_they_were_given():
    rng = Random(1)
    drawn = sorted(Quantiles(POINTS).draw(rng) for _ in range(4001))
    assert drawn[0] >= 10
    assert drawn[-1] <= 1000
    assert drawn[2000] == pytest.approx(100, rel=0.2)
    assert drawn[1000] == pytest.approx(55, rel=0.1)
    assert drawn[3000] == pytest.approx(550, rel=0.1)


def test_tokens_are_at_least_one():
    assert Quantiles(((0, 0), (1, 0))).tokens(Random(0)) == 1


@pytest.mark.parametrize(
    "points", [((0.1, 1), (1, 2)), ((0, 1), (0.9, 2)), ((0, 2), (1, 1)), ((0, 1), (0.6, 2), (0.5, 3), (1, 4))]
)
def test_what_does_not_ascend_from_0_to_1_is_refused(points):
    with pytest.raises(ValueError, match="not quantiles"):
        Quantiles(points)
