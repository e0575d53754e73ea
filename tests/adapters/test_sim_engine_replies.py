import json
from array import array
from typing import Any

import pytest

from extproc.adapters.sim_engine_replies import SHAPES, Answered, Choice, Shape
from extproc.protocol.usage import UsageReader

PROMPT = array("I", range(40))


def answered(**options: Any) -> Answered:
    choice = Choice(0, PROMPT, "one two three", [1, 2, 3], "length", 32)
    defaults = {"request_id": "id", "model": "m", "created": 7, "choices": [choice], "prompts": [PROMPT]}
    return Answered(**{**defaults, **options})


def streamed(shape: Shape, answer: Answered) -> bytes:
    choice = answer.choices[0]
    return b"".join(
        (*shape.opening(answer), shape.news(answer, choice, choice.text, [1, 2, 3]), *shape.closing(answer))
    )


@pytest.mark.parametrize("path", SHAPES)
def test_whole_and_streamed_answers_carry_the_same_usage(path: str) -> None:
    """Read by the parser that reads real engines' answers."""
    shape = SHAPES[path]
    whole = usage(json.dumps(shape.whole(answered())).encode(), "application/json")
    stream = usage(streamed(shape, answered(include_usage=True)), "text/event-stream")
    assert whole == stream == (40, 32, 3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_openai_stream_has_usage_only_on_request(path: str) -> None:
    text = streamed(SHAPES[path], answered())
    assert b'"usage"' not in text
    assert text.endswith(b"data: [DONE]\n\n")


def test_a_batch_counts_all_prompts_and_reports_the_last_ones_hit() -> None:
    choices = [Choice(0, PROMPT, "a", [1], "stop", 16), Choice(1, PROMPT, "b", [2, 3], "stop", 32)]
    assert answered(choices=choices, prompts=[PROMPT, PROMPT]).usage() == {
        "prompt_tokens": 80,
        "completion_tokens": 3,
        "total_tokens": 83,
        "prompt_tokens_details": {"cached_tokens": 32},
    }


@pytest.mark.parametrize("path", SHAPES)
def test_a_stream_is_made_of_server_sent_events(path: str) -> None:
    text = streamed(SHAPES[path], answered()).decode()
    assert text.endswith("\n\n")
    for event in text.removesuffix("\n\n").split("\n\n"):
        *names, data = event.split("\n")
        assert data.startswith("data: ")
        if data != "data: [DONE]":
            body = json.loads(data[6:])
            assert names in ([], [f"event: {body.get('type')}"])


@pytest.mark.parametrize(
    ("path", "length", "stop"),
    [
        ("/v1/completions", "length", "stop"),
        ("/v1/chat/completions", "length", "stop"),
        ("/v1/responses", "incomplete", "completed"),
        ("/v1/messages", "max_tokens", "end_turn"),
    ],
)
def test_each_shape_has_its_own_words_for_how_an_answer_ended(path: str, length: str, stop: str) -> None:
    for reason, word in (("length", length), ("stop", stop)):
        choice = Choice(0, PROMPT, "one", [1], reason, 0)  # type: ignore[arg-type]  # each is one of the reasons
        whole = SHAPES[path].whole(answered(choices=[choice]))
        ended = whole.get("status") or whole.get("stop_reason") or whole["choices"][0]["finish_reason"]
        assert ended == word


def usage(body: bytes, content_type: str) -> tuple[int | None, int | None, int | None]:
    reader = UsageReader(content_type)
    reader.feed(body)
    found = reader.finish()
    assert found is not None
    return found.prompt_tokens, found.cached_tokens, found.output_tokens
