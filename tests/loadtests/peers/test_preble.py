from collections import Counter

import pytest

from loadtests.peers.preble import Preble
from tests.loadtests.peers.support import Asking, document, facts


def test_a_prompt_that_is_mostly_known_goes_where_it_is_known():
    asking = Asking(Preble(facts(3), 0))
    home = asking.ask(document(0, 20))
    for number in range(1, 8):
        assert asking.ask(document(0, 20) + document(number, 10)) == home


def test_a_prompt_that_is_mostly_new_goes_to_the_cheapest():
    asking = Asking(Preble(facts(3), 0))
    home = asking.ask(document(0, 20))
    assert asking.ask(document(0, 20) + document(1, 21)) != home
    assert asking.ask(document(5, 30)) not in (home, None)


def test_cold_prompts_are_spread():
    asking = Asking(Preble(facts(3), 0))
    sent = Counter(asking.ask(document(number, 30)) for number in range(30))
    assert sorted(sent.values()) == [10, 10, 10]


def test_the_cost_is_prefill_of_the_window_and_output_under_way():
    router = Preble(facts(2), 0)
    asking = Asking(router)
    home = asking.ask(document(0, 9), extra=16, max_output_tokens=100)  # 160 tokens, all new
    prefill = router._time.step_s(160, 160 * 159 / 2, 0, 0)
    costs = router._costs(1)
    assert costs[home] == pytest.approx(prefill + 1 * 100 * 0.15)
    assert costs[1 - home] == 0
    asking.now = 2.0
    asking.first(1)
    asking.now = 4.0
    router.on_finished("r1", 0, 101, 4.0)  # TPOT 0.02; the median of that and 0.15
    assert router._costs(1)[home] == pytest.approx(prefill)
    asking.now = 185.0
    asking.ask(document(3, 2))
    assert len(router._important) == 1


def test_without_a_limit_45_tokens_are_expected():
    router = Preble(facts(1), 0)
    Asking(router).ask(document(0, 9))
    assert next(iter(router._important.values())).output_tokens == 45


def test_important_nodes_move_when_a_worker_costs_half_as_much_again():
    router = Preble(facts(2), 0)
    asking = Asking(router)
    # Four documents on worker 0, nothing on 1: below 100 requests nothing moves.
    router._cheapest = lambda leaf, workers: 0
    for number in range(99):
        asking.ask(document(number % 4, 20), extra=8)
    assert {frozenset(node.allocated) for node in router._important} == {frozenset({0})}
    asking.ask(document(0, 20), extra=8)
    allocated = Counter(frozenset(node.allocated) for node in router._important)
    assert allocated[frozenset({1})] == 2
    assert allocated[frozenset({0})] == 2


def test_a_single_busy_node_is_shared_once_its_requests_slow_down():
    router = Preble(facts(2), 0)
    asking = Asking(router)
    homes = []
    for number in range(1, 131):
        asking.now = number * 1.3
        homes.append(asking.ask(document(0, 20), extra=8))
        # The first token comes after 0.1 s in the older half of the window, after 0.3 s in the newer.
        asking.now += 0.1 if number * 1.3 < 80 else 0.3
        asking.first(number)
        if number % 3:  # some stay under way, so the worker costs something
            asking.end(number)
    assert len(set(homes[:100])) == 1
    (node,) = router._important
    assert node.allocated == {0, 1}


def test_workers_that_share_a_node_share_its_prefill():
    router = Preble(facts(2), 0)
    asking = Asking(router)
    asking.ask(document(0, 20))
    asking.end(1)
    (node,) = router._important
    (alone,) = [cost for cost in router._costs(1) if cost]
    node.allocated = {0, 1}
    assert router._costs(1) == pytest.approx([alone / 2, alone / 2])


def test_what_would_be_evicted_counts():
    router = Preble(facts(2), 0)
    asking = Asking(router)
    for number, (name, blocks, worker) in enumerate(((0, 25, 0), (1, 5, 1), (2, 19, 1)), 1):
        router._cheapest = lambda leaf, workers, worker=worker: worker
        asking.now = float(number)
        asking.ask(document(name, blocks))
        asking.end(number)
    del router._cheapest
    # Worker 0 has less to do, but a new prompt would push out its one long document there; on worker 1 a
    # short one goes.
    costs = router._costs(1)
    assert costs[0] < costs[1]
    assert asking.ask(document(3, 3)) == 1
