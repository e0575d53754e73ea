import json
from dataclasses import replace

import pytest

from extproc.protocol.openai import InferenceRequest, parse_request
from loadtests.decisions.workload import SHAPES, Bodies

SMALL = replace(SHAPES["sessions"], sessions=4, size=20_000)


def parsed(body: bytes) -> InferenceRequest:
    request = parse_request("POST", "/v1/chat/completions", {}, body)
    assert isinstance(request, InferenceRequest)
    return request


def test_sessions_grow_by_two_messages_and_keep_what_they_said():
    bodies = Bodies(SMALL, 1)
    known = {body["messages"][0]["content"]: body["messages"] for body in map(json.loads, bodies.first())}
    assert len(known) == SMALL.sessions
    for _ in range(20):
        messages = parsed(bodies.next()).body["messages"]
        before = known[messages[0]["content"]]
        assert messages[: len(before)] == before
        assert [message["role"] for message in messages[len(before) :]] == ["assistant", "user"]
        grown = sum(len(message["content"]) for message in messages[len(before) :])
        assert grown == pytest.approx(SMALL.turn, rel=0.1)
        known[messages[0]["content"]] = messages


def test_a_session_is_as_long_as_it_says():
    assert all(len(body) == pytest.approx(SMALL.size, rel=0.1) for body in Bodies(SMALL, 1).first())


def test_short_prompts_are_all_new():
    shape = SHAPES["short"]
    bodies = Bodies(shape, 1)
    assert bodies.first() == []
    texts = [parsed(bodies.next()).body["messages"][0]["content"] for _ in range(200)]
    assert len({text[:16] for text in texts}) == 200
    assert all(len(text) == pytest.approx(shape.size, rel=0.1) for text in texts)


def test_seeds_make_texts_and_nothing_else_does():
    one, same, other = Bodies(SMALL, 1), Bodies(SMALL, 1), Bodies(SMALL, 2)
    assert one.first() == same.first() != other.first()
    assert [one.next() for _ in range(5)] == [same.next() for _ in range(5)]
