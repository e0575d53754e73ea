import pytest

from extproc.core.errors import ProtocolError
from extproc.protocol.ext_proc_messages import BodyMode, RequestBody, RequestHeaders, RequestTrailers
from extproc.protocol.ext_proc_request import REQUEST_TABLE, RequestHalf, RequestState, Signal, Step

HEADERS = RequestHeaders({":path": "/"})


def test_every_state_but_the_first_is_reached_and_the_table_is_closed():
    reached = {state for state, _ in REQUEST_TABLE.values()}
    assert reached == set(RequestState) - {RequestState.START}
    assert {state for state, _ in REQUEST_TABLE} == set(RequestState) - {RequestState.CLOSED}


def test_every_signal_and_step_is_used():
    assert {signal for _, signal in REQUEST_TABLE} == set(Signal)
    assert {step for _, step in REQUEST_TABLE.values()} == set(Step)


def test_a_state_that_waits_for_the_host_takes_both_answers():
    waiting = {state for state, signal in REQUEST_TABLE if signal is Signal.ANSWER}
    assert waiting == {
        state for state, signal in REQUEST_TABLE if signal is Signal.REFUSAL and state in waiting
    }
    assert {REQUEST_TABLE[state, Signal.REFUSAL] for state in waiting} == {
        (RequestState.REFUSED, Step.REFUSE)
    }


@pytest.mark.parametrize(
    "events",
    [
        [RequestBody(b"x")],
        [RequestTrailers()],
        [HEADERS, HEADERS],
        [HEADERS, RequestBody(b"x", end_of_stream=True), RequestTrailers()],
        [HEADERS, RequestTrailers(), RequestTrailers()],
        [HEADERS, RequestTrailers(), RequestBody(b"x")],
    ],
)
def test_illegal_orders_name_the_event_and_the_state(events):
    half = RequestHalf(BodyMode.FULL_DUPLEX_STREAMED, 100)
    *legal, illegal = events
    for event in legal:
        half.receive(event)
    with pytest.raises(ProtocolError, match=type(illegal).__name__) as error:
        half.receive(illegal)
    assert half.state.name in str(error.value)
