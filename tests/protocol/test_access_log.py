import pytest

from extproc.core.types import Completion, Outcome
from extproc.protocol.access_log import AccessLogEntry, Progress, classify, left_early, read_entry

WORKER = "10.0.0.1:8000"


def entry(**fields) -> AccessLogEntry:
    return AccessLogEntry(
        **{"ticket": "t", "log_type": 6, "status": 200, "upstream": WORKER, "details": "via_upstream"}
        | fields
    )


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({}, Outcome.FINISHED),
        ({"log_type": 0}, Outcome.FINISHED),
        ({"status": 500}, Outcome.FINISHED),
        ({"flags": {"downstream_connection_termination"}, "status": 0}, Outcome.CANCELLED),
        ({"flags": {"downstream_remote_reset"}}, Outcome.CANCELLED),
        ({"flags": {"upstream_protocol_error"}}, Outcome.FAILED),
        ({"details": "upstream_reset_after_response_started{remote_reset}"}, Outcome.FAILED),
        (
            {
                "details": "upstream_reset_after_response_started{protocol_error}",
                "flags": {"upstream_protocol_error", "downstream_connection_termination"},
            },
            Outcome.FAILED,
        ),
        ({"flags": {"upstream_connection_termination"}, "status": 503}, Outcome.FAILED),
        ({"flags": {"upstream_remote_reset"}, "status": 503}, Outcome.FAILED),
        ({"flags": {"upstream_request_timeout"}, "status": 504}, Outcome.FAILED),
        ({"flags": {"stream_idle_timeout"}}, Outcome.FAILED),
        ({"flags": {"upstream_connection_failure"}, "status": 503}, Outcome.REJECTED),
        (
            {"flags": {"upstream_connection_failure", "upstream_retry_limit_exceeded"}, "status": 503},
            Outcome.REJECTED,
        ),
        ({"flags": {"no_healthy_upstream"}, "upstream": None, "status": 503}, Outcome.REJECTED),
        ({"flags": {"no_route_found"}, "upstream": None, "status": 404}, Outcome.REJECTED),
        ({"flags": {"upstream_overflow"}, "status": 503}, Outcome.REJECTED),
        ({"upstream": None}, Outcome.REJECTED),
        ({"details": "warmroute_overloaded", "status": 429}, Outcome.REJECTED),
        ({"flags": {"stream_idle_timeout"}, "upstream": None}, Outcome.REJECTED),
    ],
)
def test_outcomes(fields, outcome):
    assert (
        classify(entry(**{key: frozenset(v) if key == "flags" else v for key, v in fields.items()}))
        is outcome
    )


def test_a_finished_request():
    found = read_entry(
        entry(
            attempts=2,
            duration_ms=1234.5,
            tags={"ticket": "t", "first_body_us": "250500", "prefill_us": "240000"},
            usage={"prompt_tokens": 100.0, "completion_tokens": 5.0, "cached_tokens": 64.0},
        )
    )
    assert found == (
        "t",
        Completion(
            outcome=Outcome.FINISHED,
            served_by=WORKER,
            status=200,
            attempts=2,
            first_body_ms=250.5,
            upstream_first_body_ms=240.0,
            duration_ms=1234.5,
            prompt_tokens=100,
            cached_tokens=64,
            output_tokens=5,
            details="via_upstream",
        ),
    )


def test_what_is_not_reported_is_none():
    found = read_entry(entry(tags={"first_body_us": "-", "prefill_us": ""}, details=""))
    assert found is not None
    completion = found[1]
    assert isinstance(completion, Completion)
    unknown = ("attempts", "first_body_ms", "upstream_first_body_ms", "duration_ms", "prompt_tokens")
    assert [getattr(completion, name) for name in unknown] == [None] * len(unknown)
    assert completion.details is None


def test_a_worker_that_was_not_reached_did_not_serve():
    found = read_entry(entry(flags=frozenset({"upstream_connection_failure"})))
    assert found is not None
    assert found[1].served_by is None
    assert found[1].labels == {"tried": WORKER}


@pytest.mark.parametrize(
    ("flags", "labels"),
    [
        ({"upstream_request_timeout"}, {"time_limit": "upstream_request_timeout"}),
        ({"stream_idle_timeout", "duration_timeout"}, {"time_limit": "duration_timeout"}),
        ({"upstream_request_timeout", "upstream_remote_reset"}, {}),  # it has died, whatever the time
        ({"stream_idle_timeout", "downstream_remote_reset"}, {}),  # the client left
        ({"upstream_remote_reset"}, {}),
        (set(), {}),
    ],
)
def test_a_worker_that_ran_into_a_time_limit_is_not_gone(flags, labels):
    found = read_entry(entry(flags=frozenset(flags)))
    assert found is not None
    assert found[1].labels == labels


@pytest.mark.parametrize(
    "fields", [{"log_type": 4}, {"log_type": 5}, {"log_type": 9}, {"intermediate": True}]
)
def test_entries_about_running_requests(fields):
    tags = {"first_body_us": "1500"}
    assert read_entry(entry(**fields, tags=tags, response_bytes=10)) == ("t", Progress(1.5, 10))


def test_the_ticket_may_come_as_a_tag():
    found = read_entry(entry(ticket=None, tags={"ticket": "from-tag"}))
    assert found is not None
    assert found[0] == "from-tag"


@pytest.mark.parametrize("tags", [{}, {"ticket": ""}, {"ticket": "-"}])
def test_requests_of_others_are_skipped(tags):
    assert read_entry(entry(ticket=None, tags=tags)) is None


@pytest.mark.parametrize("figure", ["9" * 17, "9" * 5000, "²", "-1", "1.5", "1e3"])
def test_a_time_that_is_none_is_unknown(figure):
    _, completion = read_entry(entry(tags={"first_body_us": figure}))
    assert completion.first_body_ms is None


EARLY = {
    "ticket": None,
    "upstream": None,
    "status": 0,
    "details": "downstream_remote_disconnect",
    "flags": {"downstream_connection_termination"},
    "request_id": "r\x1b1",
    "duration_ms": 12.0,
    "tags": {"ticket": "-"},
}


def test_a_client_that_left_before_the_ticket_is_known_by_its_request_id():
    request_id, done = left_early(entry(**EARLY))
    assert request_id == "r?1"  # as it was noted when it came
    assert (done.outcome, done.duration_ms, done.served_by) == (Outcome.CANCELLED, 12.0, None)
    assert done.details == "downstream_remote_disconnect"


@pytest.mark.parametrize(
    "change",
    [
        {"ticket": "t"},
        {"tags": {"ticket": "t"}},
        {"upstream": WORKER},
        {"flags": frozenset()},
        {"request_id": ""},
        {"log_type": 5},
        {"intermediate": True},
    ],
)
def test_no_other_entry_is_about_a_client_that_left_so_early(change):
    assert left_early(entry(**(EARLY | change))) is None
