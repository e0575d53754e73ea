from collections import Counter

import pytest

from loadtests.peers.dynamo_formula import DynamoFormula
from tests.loadtests.peers.support import Asking, document, facts, removed, stored


def test_a_cold_request_costs_its_prefill_and_its_blocks():
    router = DynamoFormula(facts(2), 0)
    request = Asking(router).request(document(0, 9), extra=16)  # 160 tokens, as many as 10 blocks
    assert router.costs(request) == [10 + 10, 10 + 10]
    request = Asking(router).request(document(0, 9), extra=8)
    assert router.costs(request) == [9.5 + 9, 9.5 + 9]


def test_overlap_is_taken_off_the_prefill_only():
    router = DynamoFormula(facts(2), 0)
    router.on_kv_events(1, [stored(document(0, 6))], 0.0)
    assert router.costs(Asking(router).request(document(0, 9))) == [9.5 + 9, 3.5 + 9]
    router.on_kv_events(1, [removed(document(0, 6)[4:])], 0.0)
    assert router.costs(Asking(router).request(document(0, 9))) == [9.5 + 9, 5.5 + 9]


def test_what_is_under_way_costs_until_its_first_token_and_its_end():
    router = DynamoFormula(facts(2), 0)
    asking = Asking(router)
    home = asking.ask(document(0, 4), extra=16)  # 80 tokens: 5 blocks
    other = asking.request(document(1, 1), extra=16)  # 32 tokens: 2 blocks
    assert router.costs(other)[home] == (80 + 32) / 16 + 5 + 2
    assert router.costs(other)[1 - home] == 2 + 2
    asking.first(1)
    assert router.costs(other)[home] == 2 + 5 + 2
    asking.end(1)
    assert router.costs(other)[home] == 2 + 2


def test_equal_blocks_are_counted_once():
    router = DynamoFormula(facts(2), 0)
    asking = Asking(router)
    home = asking.ask(document(0, 4), extra=8)
    asking.first(1)
    assert router.costs(asking.request(document(0, 6), extra=8))[home] == 6.5 + 6


def test_only_uncovered_tokens_are_booked_as_prefill():
    router = DynamoFormula(facts(1), 0)
    router.on_kv_events(0, [stored(document(0, 6))], 0.0)
    Asking(router).ask(document(0, 9))
    assert router.prefill_tokens == [3 * 16 + 8]


def test_fully_cached_prompts_herd():
    """Seen with Dynamo's own service: 500 / 0 / 0. Nothing is left to compute, and shared blocks are free."""
    router = DynamoFormula(facts(3), 0)
    router.on_kv_events(1, [stored(document(0, 100))], 0.0)
    asking = Asking(router)
    sent = Counter(asking.ask(document(0, 100), extra=1) for _ in range(500))
    assert sent[1] == 500


def test_equals_are_chosen_by_chance():
    asking = Asking(DynamoFormula(facts(3), 0))
    sent = Counter()
    for number in range(1, 301):
        sent[asking.ask(document(number, 4))] += 1
        asking.end(number)
    assert min(sent.values()) > 60


@pytest.mark.parametrize(
    ("weights", "cost"),
    [
        ({}, 4 + 10),
        ({"prefill_scale": 2.0}, 8 + 10),
        ({"overlap_credit": 0.5}, 7 + 10),
        ({"request_weight": 3.0}, 4 + 10 + 3),
    ],
)
def test_weights_can_be_set(weights, cost):
    router = DynamoFormula(facts(1), 0, **weights)
    asking = Asking(router)
    if "request_weight" in weights:
        asking.ask((), extra=1)
        asking.first(1)
    router.on_kv_events(0, [stored(document(0, 6))], 0.0)
    assert router.costs(asking.request(document(0, 9), extra=16)) == [cost]
