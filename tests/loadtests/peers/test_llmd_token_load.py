from loadtests.peers.llmd_token_load import LlmdTokenLoad
from tests.loadtests.peers.support import Asking, document, facts


def test_uncached_tokens_are_in_flight_until_the_first_token():
    router = LlmdTokenLoad(facts(2), 0)
    asking = Asking(router)
    home = asking.ask(document(0, 12))  # 200 tokens: 4 chunks of 64
    assert router.tokens[home] == 256
    asking.ask(document(0, 12))  # 3 of 4 chunks match: 0.75 is not sticky, so the other takes it
    assert router.tokens == [256, 256]
    asking.first(1)
    assert router.tokens[home] == 0
    asking.end(1)
    assert router.tokens[home] == 0
    asking.end(2)
    assert router.tokens == [0, 0]


def test_a_worker_with_four_fifths_of_the_prompt_keeps_it():
    router = LlmdTokenLoad(facts(2), 0)
    asking = Asking(router)
    home = asking.ask(document(0, 16))  # 264 tokens: 5 chunks, of which 4 can match
    assert {asking.ask(document(0, 16)) for _ in range(40)} == {home}
    assert router.tokens[home] == 320 + 40 * 64


def test_the_filter_gives_way_to_18_seconds():
    router = LlmdTokenLoad(facts(3), 0)
    router.tokens = [286_704, 500_000, 1]  # 18 s and a little: less than 18 s apart
    assert router.sticky([0.8, 0.79, 0.0]) == [0]
    router.tokens[0] = 286_706
    assert router.sticky([0.8, 0.79, 0.0]) == [0, 1, 2]


def test_the_best_of_several_sticky_workers_decides():
    router = LlmdTokenLoad(facts(3), 0)
    router.tokens = [400_000, 100_000, 0]
    assert router.sticky([1.0, 0.9, 0.0]) == [0, 1]


def test_without_sticky_workers_all_stay():
    assert LlmdTokenLoad(facts(3), 0).sticky([0.79, 0.0, 0.5]) == [0, 1, 2]
    assert LlmdTokenLoad(facts(2), 0).sticky([0.8, 0.9]) == [0, 1]


def test_beyond_the_threshold_all_loads_are_equal():
    router = LlmdTokenLoad(facts(2), 0)
    router.tokens = [4_194_304, 9_000_000]
    asking = Asking(router)
    assert {asking.ask(document(number, 1)) for number in range(40)} == {0, 1}
