import json

import pytest

from extproc.protocol import rejections
from extproc.protocol.rejections import Reject


@pytest.mark.parametrize(
    ("reject", "status", "details"),
    [
        (rejections.malformed("x"), 400, "warmroute_malformed"),
        (rejections.empty_body(), 400, "warmroute_empty_body"),
        (rejections.not_permitted("x"), 403, "warmroute_not_permitted"),
        (rejections.unknown_model("m"), 404, "warmroute_unknown_model"),
        (rejections.body_too_large(5), 413, "warmroute_body_too_large"),
        (rejections.overloaded(3), 429, "warmroute_overloaded"),
        (rejections.no_ready_endpoint(), 503, "warmroute_no_ready_endpoint"),
    ],
)
def test_every_refusal_has_openais_shape(reject, status, details):
    assert (reject.status, reject.details) == (status, details)
    error = json.loads(reject.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)


def test_overload_says_when_to_come_back():
    assert rejections.overloaded(3).headers == {"retry-after": "3"}
    assert rejections.overloaded().headers == {}


def test_any_message_can_be_sent():
    reject = rejections.malformed('quote " newline \n lone surrogate \udc80')
    assert json.loads(reject.body)["error"]["message"].startswith('quote " newline \n')


def test_an_unknown_models_name_is_not_repeated_at_length():
    assert len(rejections.unknown_model("m" * 100_000).body) < 1000


@pytest.mark.parametrize(
    "arguments",
    [
        {"status": 200, "message": "m", "why": "w"},
        {"status": 400, "message": "m", "why": "Not a token"},
        {"status": 400, "message": "m", "why": "w", "headers": {"Bad Name": "x"}},
        {"status": 400, "message": "m", "why": "w", "headers": {"x": "a\r\nb"}},
    ],
)
def test_refusals_that_cannot_be_sent_are_not_made(arguments):
    with pytest.raises(ValueError):
        Reject(**arguments)
