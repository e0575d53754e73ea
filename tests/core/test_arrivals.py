from hypothesis import given
from hypothesis import strategies as st

from extproc.core.arrivals import Arrivals
from tests.support.core import worker

W = worker(0)


def test_tokens_sent_in_a_stretch_of_time_both_ends_included():
    arrivals = Arrivals()
    for now, tokens in ((1.0, 10), (2.0, 20), (2.0, 30), (3.0, 40)):
        arrivals.note(W, tokens, now)
    assert arrivals.between(W, 1.0, 3.0) == 100
    assert arrivals.between(W, 1.5, 2.0) == 50
    assert arrivals.between(W, 2.1, 2.9) == 0
    assert arrivals.between(W, 3.0, 9.0) == 40
    assert arrivals.between(worker(1), 0.0, 9.0) == 0


def test_what_is_too_long_ago_is_not_known_and_memory_is_bounded():
    arrivals = Arrivals()
    for now in range(5000):
        arrivals.note(W, 1, float(now))
    assert len(arrivals._workers[W].times) < 1024
    assert arrivals.between(W, 0.0, 10.0) is None
    assert arrivals.between(W, 4900.0, 4999.0) == 100


def test_a_worker_that_left_is_forgotten():
    arrivals = Arrivals()
    arrivals.note(W, 7, 1.0)
    arrivals.forget(W)
    assert arrivals.between(W, 0.0, 2.0) == 0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=40),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_it_is_the_sum_of_what_was_noted(notes, start, end):
    arrivals = Arrivals()
    for now, tokens in sorted(notes):
        arrivals.note(W, tokens, float(now))
    expected = sum(tokens for now, tokens in notes if start <= now <= end)
    assert arrivals.between(W, float(start), float(end)) == expected
