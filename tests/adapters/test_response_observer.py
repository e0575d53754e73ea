import pytest

from extproc.adapters.response_observer import ResponseObserver, Seen
from extproc.core.types import Outcome
from extproc.protocol.ext_proc_messages import (
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)

SERVED = {"envoy.lb": {"x-gateway-destination-endpoint-served": "10.0.0.1:8000"}}


def test_times_are_milliseconds_from_the_request_and_from_the_answer():
    observer = ResponseObserver(begun=10.0, answered=10.5)
    observer.see(ResponseHeaders({":status": "200"}), SERVED, 11.0)
    assert observer.see(ResponseBody(b"x"), SERVED, 12.0) == Seen(first_body=True)
    seen = observer.see(ResponseTrailers(), SERVED, 14.0)
    assert not seen.first_body
    done = seen.completion
    assert done is not None
    assert (done.first_body_ms, done.upstream_first_body_ms, done.duration_ms) == (2000.0, 1500.0, 4000.0)
    assert (done.outcome, done.served_by, done.status) == (Outcome.FINISHED, "10.0.0.1:8000", 200)


@pytest.mark.parametrize("status", ["", "x", "²"])
def test_a_status_that_is_no_number_is_unknown(status):
    observer = ResponseObserver(0, 0)
    seen = observer.see(ResponseHeaders({":status": status}, end_of_stream=True), {}, 1)
    assert seen.completion is not None
    assert seen.completion.status is None
    assert seen.completion.first_body_ms is None


def test_a_response_ends_once():
    observer = ResponseObserver(0, 0)
    assert observer.see(ResponseBody(b"x", end_of_stream=True), {}, 1).completion is not None
    assert observer.see(ResponseBody(b"x", end_of_stream=True), {}, 2) == Seen()


def test_request_parts_say_nothing():
    assert ResponseObserver(0, 0).see(RequestTrailers(), {}, 1) == Seen()
