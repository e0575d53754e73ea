from collections import Counter

import pytest

from loadtests.peers.aibrix_prefix_cache import AibrixPrefixCache
from tests.loadtests.peers.support import Asking, document, facts


def learnt(replicas=3):
    """A router whose worker 0 was sent document 0 (10 blocks) and worker 1 its first 5."""
    router = AibrixPrefixCache(facts(replicas), 0)
    asking = Asking(router)
    router.in_flight.counts = [0, *[1] * (replicas - 1)]
    assert asking.ask(document(0, 10)) == 0
    router.in_flight.counts = [1, 0, *[1] * (replicas - 2)]
    router.choose = lambda request: 1
    asking.ask(document(0, 5))
    del router.choose
    router.in_flight.counts = [0] * replicas
    return router, asking


def test_matches_are_whole_percents_of_the_prompt():
    router, asking = learnt()
    request = asking.request(document(0, 10))  # 168 tokens
    assert router.matches(request, {0, 1, 2}) == {0: 160 * 100 // 168, 1: 80 * 100 // 168}
    assert router.matches(request, {1, 2}) == {1: 47}
    assert router.matches(asking.request(document(7, 3)), {0, 1, 2}) == {}


def test_the_longest_match_wins_within_one_deviation_of_the_mean_load():
    router, asking = learnt()
    request = asking.request(document(0, 10))
    router.in_flight.counts = [4, 2, 0]  # mean 2, sample deviation 2: 4 is just allowed
    assert router.choose(request) == 0
    router.in_flight.counts = [5, 2, 0]  # mean 2.33 + 2.52 = 4.85
    assert router.choose(request) == 1


def test_more_than_8_apart_only_the_least_running_can_match():
    router, asking = learnt()
    request = asking.request(document(0, 10))
    router.in_flight.counts = [8, 8, 0]  # mean 5.33 + 4.62 = 9.95
    assert router.choose(request) == 0
    router.in_flight.counts = [9, 9, 0]
    assert router.choose(request) == 2
    router.in_flight.counts = [9, 0, 0]
    assert router.choose(request) == 1


def test_without_a_match_the_least_running_are_chosen_by_chance():
    router = AibrixPrefixCache(facts(3), 0)
    asking = Asking(router)
    router.in_flight.counts = [1, 0, 0]
    chosen = Counter(router.choose(asking.request(document(n, 2))) for n in range(200))
    assert set(chosen) == {1, 2}
    assert min(chosen.values()) > 60


@pytest.mark.parametrize(("later", "found"), [(1200.0, True), (1200.1, False)])
def test_a_block_is_forgotten_20_minutes_after_it_was_sent(later, found):
    router, asking = learnt()
    router.in_flight.counts = [1, 1, 0]
    asking.now = later
    expected = 0 if found else 2
    assert asking.ask(document(0, 10)) == expected


def test_the_table_holds_200_000_tokens_in_all():
    router, asking = learnt()
    asking.ask(document(1, 12_495))  # 12,500 blocks of 16 tokens in all, so 5 of the first must go
    assert router.matches(asking.request(document(1, 12_495)), {0, 1, 2})
    first = asking.request(document(0, 10))
    assert router.matches(first, {0, 1, 2})
    asking.ask(document(2, 10))
    assert router.matches(first, {0, 1, 2}) == {}
