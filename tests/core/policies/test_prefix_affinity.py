from random import Random

from extproc.core.cost import CostSettings
from extproc.core.policies import PrefixAffinity
from tests.support.core import candidate, request, worker


def order(*candidates, seed=1):
    ordered, _ = PrefixAffinity(CostSettings()).order(request(range(200)), candidates, Random(seed))
    return [c.worker for c in ordered]


def test_the_longest_hit_goes_first_while_load_is_even():
    assert order(candidate(0), candidate(1, cached=160), candidate(2, cached=64)) == [
        worker(1),
        worker(2),
        worker(0),
    ]


def test_pitfall_67_when_every_match_has_too_much_load_the_free_one_is_taken():
    ordered = order(
        candidate(0, cached=192, active=8), candidate(1, cached=192, active=8), candidate(2, active=0)
    )
    assert ordered[0] == worker(2)


def test_equal_hits_go_to_the_less_loaded_then_to_chance():
    assert order(candidate(0, cached=64, active=2), candidate(1, cached=64, active=1))[0] == worker(1)
    firsts = {order(candidate(0), candidate(1), seed=seed)[0] for seed in range(20)}
    assert len(firsts) == 2
