from loadtests.peers.ray_prefix_affinity import RayPrefixAffinity
from tests.loadtests.peers.support import Asking, document, facts


def test_a_tenth_of_the_characters_is_enough():
    router = RayPrefixAffinity(facts(3), 0)
    asking = Asking(router)
    assert asking.ask(document(0, 1), extra=16) == 0
    # The smallest trees are those of 1 and 2; 16 of 160 tokens match that of 0.
    assert router.candidates(asking.request(document(0, 1) + document(1, 8), extra=16)) == [0]
    assert router.candidates(asking.request(document(0, 1) + document(1, 9), extra=1)) == [1, 2]


def test_no_load_ever_ends_affinity():
    asking = Asking(RayPrefixAffinity(facts(3), 0))
    assert {asking.ask(document(0, 20)) for _ in range(500)} == {0}


def test_cold_prompts_go_to_the_smallest_tree_and_of_equals_to_the_shortest_queue():
    router = RayPrefixAffinity(facts(3), 0)
    asking = Asking(router)
    router.in_flight.counts = [2, 1, 3]
    assert asking.ask(document(0, 8)) == 1
    assert asking.ask(document(1, 2)) == 0
    assert asking.ask(document(2, 1)) == 2
    assert asking.ask(document(3, 1)) == 2  # 1 block, against 8 and 2


def test_of_several_that_match_the_shortest_queue_takes_it():
    router = RayPrefixAffinity(facts(3), 0)
    for worker in (0, 2):
        router.tree.insert(document(0, 8), worker)
    router.in_flight.counts = [4, 0, 3]
    assert Asking(router).ask(document(0, 8)) == 2
