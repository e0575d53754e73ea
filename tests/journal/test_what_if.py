import pytest

from extproc.core.types import CostBreakdown, Decision, Reason
from extproc.journal.replay import Step
from extproc.journal.what_if import Spread, Tally, spread
from tests.support.core import candidate, request


def priced(n, total, cached=0):
    return candidate(n, cached=cached, uncovered=100 - cached, cost=CostBreakdown(1.0, total - 1.0, 0.0, 0.0))


def step(number, was, instead=None, *, exact=True, others=()):
    found = (was, *others) if instead in (None, was) else (was, instead, *others)
    made = Decision(str(number), request(request_id=f"r{number}"), found, Reason.COLD_IDLE, "token-load", 0.0)
    return Step(number, float(number), {}, made, exact, instead, Reason.WARM_EXACT if instead else None)


def test_exact_and_drifted_decisions_are_counted():
    tally = Tally()
    for number in range(10):
        tally.add(step(number, priced(0, 5.0), exact=number not in (3, 7)))
    assert (tally.requests, tally.exact, tally.drifts) == (10, 8, [3, 7])
    assert tally.compared == tally.changed == 0


def test_a_refused_request_is_no_comparison():
    tally = Tally()
    tally.add(Step(0, 0.0, {"refused": "x"}, None, exact=True))
    assert (tally.requests, tally.exact, tally.compared) == (1, 1, 0)


def test_both_choices_are_added_up_at_the_same_prices():
    tally = Tally()
    tally.add(step(0, priced(0, 10.0), priced(1, 30.0, cached=60)))
    same = priced(2, 20.0, cached=20)
    tally.add(step(1, same, same))
    assert (tally.compared, tally.changed) == (2, 1)
    assert (tally.was.total_ms, tally.instead.total_ms) == ([10.0, 20.0], [30.0, 20.0])
    assert (tally.was.cached_tokens, tally.instead.cached_tokens) == (20, 80)
    assert (tally.was.prefill_tokens, tally.instead.prefill_tokens) == (180, 120)
    assert tally.reasons == {("cold-idle", "warm-exact"): 1}


def test_the_largest_differences_are_remembered_and_memory_is_bounded():
    tally = Tally()
    for number in range(1000):
        tally.add(step(number, priced(0, 500.0), priced(1, float(number))))
    assert len(tally._changes) <= 40
    largest = tally.largest(3)
    assert [change.request_id for change in largest] == ["r0", "r1", "r999"]
    assert [change.difference_ms for change in largest] == [-500.0, -499.0, 499.0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], Spread(None, None, None)),
        ([3.0], Spread(3.0, 3.0, 3.0)),
        (list(range(101)), Spread(50.0, 50, 95)),
    ],
)
def test_a_spread(values, expected):
    assert spread(values) == expected
