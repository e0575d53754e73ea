import json
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.live.schedule import LOADS, PROMPT_SIZES, Load, arrivals, fill, latency, rotated, templates


def bodies(load, count, model, rng):
    return [fill(template, number) for number, template in enumerate(templates(load, count, model, rng))]


def prompts(raw):
    return [json.loads(one)["messages"] for one in raw]


def test_arrivals_are_fixed_by_the_seed_and_have_the_rate():
    times = arrivals(100.0, 50.0, Random(3))
    assert times == arrivals(100.0, 50.0, Random(3))
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 50
    assert 4600 < len(times) < 5400


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_impossible_schedules_are_refused(rate, seconds):
    with pytest.raises(ValueError, match="above 0"):
        arrivals(rate, seconds, Random(0))


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_prompts_have_the_size_and_are_all_different(load):
    made = bodies(load, 20, "tiny", Random(1))
    size = PROMPT_SIZES[load.size]
    assert all(size < len(one) < size * 1.15 + 400 for one in made)
    assert len(set(made)) == 20
    assert made == bodies(load, 20, "tiny", Random(1))


def test_shared_prompts_share_documents_and_unique_ones_not_even_the_beginning():
    shared = prompts(bodies(Load("2 KB", "shared"), 32, "tiny", Random(1)))
    assert len({messages[0]["content"] for messages in shared}) == 8
    template = templates(Load("2 KB", "unique"), 1, "tiny", Random(1))[0]
    unique = prompts(fill(template, number) for number in range(500))
    assert len({messages[0]["content"][:8] for messages in unique}) == 500
    assert max(Counter(messages[0]["content"][:2] for messages in unique).values()) < 25


def test_latency_is_of_what_succeeded():
    times = [float(n) for n in range(1, 101)]
    found = latency(times, failed=3)
    assert (found.p50, found.p95, found.p99, found.requests, found.failed) == (50, 95, 99, 103, 3)
    assert latency([], failed=3) is None


@given(st.lists(st.text(max_size=3), unique=True, max_size=6))
def test_every_target_has_every_place_once(items):
    orders = [rotated(items, number) for number in range(len(items))]
    for place in range(len(items)):
        assert sorted(order[place] for order in orders) == sorted(items)
    assert rotated(items, len(items)) == items
