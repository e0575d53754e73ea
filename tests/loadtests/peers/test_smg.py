from loadtests.peers.smg import SmgCacheAware, SmgEvents
from tests.loadtests.peers.support import Asking, document, facts, removed, stored


def test_idle_workers_take_turns():
    asking = Asking(SmgCacheAware(facts(3), 0))
    sent = []
    for number in range(1, 7):
        sent.append(asking.ask(document(number, 5)))
        asking.end(number)
    assert sent == [0, 1, 2, 0, 1, 2]


def test_the_longest_overlap_wins_whatever_the_load_until_it_is_imbalanced():
    router = SmgEvents(facts(3), 0)
    router.on_kv_events(0, [stored(document(0, 4))], 0.0)
    router.on_kv_events(2, [stored(document(0, 6))], 0.0)
    asking = Asking(router)
    assert {asking.ask(document(0, 8)) for _ in range(65)} == {2}
    assert asking.ask(document(0, 8)) == 0


def test_equal_overlaps_are_told_apart_by_load_then_by_cache_size_then_by_place():
    router = SmgEvents(facts(3), 0)
    for worker in range(3):
        router.on_kv_events(worker, [stored(document(0, 4))], 0.0)
    router.on_kv_events(1, [stored(document(5, 9))], 0.0)
    asking = Asking(router)
    assert [asking.ask(document(0, 4)) for _ in range(3)] == [2, 0, 1]


def test_what_was_removed_does_not_count_and_without_overlap_load_decides():
    router = SmgEvents(facts(3), 0)
    router.on_kv_events(2, [stored(document(0, 4))], 0.0)
    router.on_kv_events(2, [removed(document(0, 4))], 0.0)
    assert Asking(router).ask(document(0, 4)) == 0
