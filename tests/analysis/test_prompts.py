import json
from array import array

import pytest

from extproc.analysis.prompts import LogClock, PromptReader, template_of
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import InferenceRequest, RequestKind
from tests.support.models import make_bos_model_dir

CLOCK = LogClock()
ENCODER = PromptEncoder.load(tiny_model_path(), clock=CLOCK)
READER = PromptReader(ENCODER, CLOCK, {})
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi there"}]}


def read(value, reader=READER):
    return reader.read(7, json.dumps(value).encode())


def test_prompts_are_encoded_as_the_server_encodes_them():
    [prompt] = read({"tenant": "blue", "session_id": "s", "time": 5, "body": CHAT}).prompts
    [ids] = ENCODER.encode(InferenceRequest(RequestKind.CHAT, "m", CHAT, 0)).prompts
    assert prompt.tokens == ids.tobytes()
    assert (prompt.tenant, prompt.session, prompt.time, prompt.model) == ("blue", "s", 5.0, "m")


def test_every_prompt_of_a_batch_counts():
    result = read({"model": "m", "prompt": ["one", "two", [1, 2, 3]]})
    assert [len(prompt.tokens) for prompt in result.prompts][2] == 12
    assert len(result.prompts) == 3


def test_logged_token_ids_are_taken_as_they_are():
    [prompt] = read({"model": "m", "prompt": "anything", "prompt_token_ids": [9, 8, 7]}).prompts
    assert prompt.tokens == array("I", [9, 8, 7]).tobytes()


def test_adapters_and_salts_share_nothing():
    names = {
        read({**CHAT, **extra}).prompts[0].namespace
        for extra in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "adapter"})
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        (b"", ("skipped", True)),
        (b'{"path": "/health"}', ("skipped", True)),
        (b'{"a": 1', ("bad", "not valid JSON (cut off?)")),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
            ("unsupported", "multimodal"),
        ),
        (b'{"messages": [5]}', ("unsupported", "message-shape")),
        (b'{"prompt": [1, -2]}', ("unsupported", "prompt-shape")),
        (b'{"prompt": "x", "prompt_token_ids": [-1]}', ("bad", "cannot be encoded (OverflowError)")),
    ],
)
def test_lines_without_a_prompt_say_why(line, outcome):
    result = READER.read(3, line)
    assert (result.number, result.prompts) == (3, ())
    assert getattr(result, outcome[0]) == outcome[1]


def test_templates_that_print_the_date_get_the_logged_one(tmp_path):
    clock = LogClock()
    reader = PromptReader(PromptEncoder.load(make_bos_model_dir(tmp_path), clock=clock), clock, {})
    one, other, same = (
        read({"time": time, "body": CHAT}, reader).prompts[0].tokens
        for time in ("2026-01-01T10:00:00Z", "2026-01-02T10:00:00Z", "2026-01-01T11:00:00Z")
    )
    assert one == same != other


def test_a_template_is_its_system_text_but_for_numbers_and_ids():
    def name(text: str, **extra) -> str:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "x"}]
        return template_of(RequestKind.CHAT, {"messages": messages, **extra})

    assert name("Rules 17, trace 4bf92f3577b34da6") == name("Rules 42, trace 0af7651916cd43dd")
    assert name("Rules") != name("Other rules")
    assert name("Rules", tools=[{}, {}]).endswith("2 tools")
    assert "Rules" not in name("Rules")
    assert template_of(RequestKind.MESSAGES, {"system": [{"text": "Rules"}]}) == name("Rules")
    assert template_of(RequestKind.RESPONSES, {"instructions": "Rules"}) == name("Rules")
    assert template_of(RequestKind.CHAT, CHAT) == template_of(RequestKind.COMPLETION, {"prompt": "x"})
    assert READER.read(1, json.dumps({"prompt_id": "v7", "body": CHAT}).encode()).prompts[0].template == "v7"
