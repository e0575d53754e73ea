import pytest

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Turn, WorkloadOptions
from extproc.sim.workloads.trace_requests import (
    TraceRequest,
    mean_rate,
    one_turn_sessions,
    selected,
    trace_lines,
)
from tests.sim.workloads.support import over


def ten():
    return (TraceRequest(10.0 + 2 * n, 100 + n, 1) for n in range(10))


def chosen(**options):
    return list(selected(ten, WorkloadOptions(**options)))


def test_time_begins_with_the_first_request():
    assert [request.at_s for request in chosen()] == [2.0 * n for n in range(10)]


def test_a_window_is_in_the_trace_s_own_time():
    assert [(r.at_s, r.prompt_tokens) for r in chosen(window_s=(13.0, 18.0))] == [(0.0, 102), (2.0, 103)]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
def test_parts_are_consecutive_and_together_everything(parts):
    pieces = [[r.prompt_tokens for r in chosen(part=(index, parts))] for index in range(parts)]
    assert [tokens for piece in pieces for tokens in piece] == list(range(100, 110))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_a_limit_applies_to_the_part():
    assert [r.prompt_tokens for r in chosen(part=(1, 2), limit=2)] == [105, 106]


def test_the_rate_is_known_from_two_requests_on():
    assert mean_rate(chosen()) == pytest.approx(0.5)
    assert mean_rate(chosen(limit=1)) is None


def test_every_request_is_a_session_of_its_own():
    sessions = list(one_turn_sessions(chosen(limit=2), lambda r, i: Turn(r.prompt_tokens, i + 1, ()), "r"))
    assert [(s.id, s.arrival_s, s.turns) for s in sessions] == [
        ("r0", 0.0, (Turn(100, 1, ()),)),
        ("r1", 2.0, (Turn(101, 2, ()),)),
    ]


def test_lines_can_be_read_again():
    lines = trace_lines(over(["a", "b"]))
    assert list(lines) == ["a", "b"] == list(lines)


def test_a_trace_without_a_reader_is_refused():
    with pytest.raises(WarmrouteError, match="read_lines"):
        trace_lines(WorkloadOptions())
