from loadtests.peers.sglang_cache_aware import SglangCacheAware
from tests.loadtests.peers.support import Asking, document, facts


def router_with(*counts):
    router = SglangCacheAware(facts(len(counts)), 0)
    router.in_flight.counts = list(counts)
    return router


def test_load_is_imbalanced_by_both_measures_or_not_at_all():
    assert not router_with(64, 0).imbalanced()
    assert router_with(65, 0).imbalanced()
    assert not router_with(195, 130).imbalanced()  # 65 apart, but exactly 1.5 times
    assert router_with(196, 130).imbalanced()
    assert not router_with(60, 30).imbalanced()


def test_sixty_with_one_prefix_go_to_one_worker():
    """Seen with sglang-router 0.3.2: 60 / 0 / 0."""
    asking = Asking(SglangCacheAware(facts(3), 0))
    assert {asking.ask(document(0, 20)) for _ in range(60)} == {0}


def test_the_66th_goes_elsewhere():
    router = SglangCacheAware(facts(3), 0)
    asking = Asking(router)
    assert {asking.ask(document(0, 20)) for _ in range(65)} == {0}
    assert asking.ask(document(0, 20)) == 1
    assert router.in_flight.counts == [65, 1, 0]


def test_idle_workers_lose_to_the_first():
    """Seen with sglang-router 0.3.2: prompts without a match, one at a time, all go to one worker."""
    asking = Asking(SglangCacheAware(facts(3), 0))
    for number in range(1, 6):
        assert asking.ask(document(number, 5)) == 0
        asking.end(number)


def test_more_than_three_tenths_of_the_characters_must_match():
    router = SglangCacheAware(facts(2), 0)
    asking = Asking(router)
    router.in_flight.counts = [1, 0]
    assert asking.ask(document(0, 3), extra=12) == 1  # learns 48 tokens, for worker 1
    router.in_flight.counts = [0, 5]
    assert asking.ask(document(0, 3) + document(1, 6), extra=16) == 0  # 48 of 160: not more than 0.3
    router.in_flight.counts = [0, 5]
    assert asking.ask(document(0, 3) + document(2, 6), extra=15) == 1  # 48 of 159
