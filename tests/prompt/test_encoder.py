import json
from datetime import date, datetime

import pytest

from extproc.core.hashing import prompt_chain
from extproc.core.namespace import Namespace
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.errors import Unsupported
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import InferenceRequest, parse_request
from tests.support.engine_ids import KINDS, RECORDING, digests, request_body
from tests.support.models import make_bos_model_dir, make_model_dir
from tests.support.prompt_cases import WEATHER, assistant, call, system, text, user

RECORDED = json.loads(RECORDING.read_text())
RECORDED_CASES = [(kind, case) for kind in KINDS for case in KINDS[kind][1]]


def parsed(path: str, body: dict) -> InferenceRequest:
    request = parse_request("POST", path, {}, json.dumps(body).encode())
    assert isinstance(request, InferenceRequest)
    return request


def chat(*messages: dict, **fields) -> InferenceRequest:
    return parsed("/v1/chat/completions", {"messages": list(messages), **fields})


def completion(prompt, **fields) -> InferenceRequest:
    return parsed("/v1/completions", {"prompt": prompt, **fields})


@pytest.fixture(scope="session")
def encoders(tmp_path_factory):
    day = datetime.combine(date.fromisoformat(RECORDED["date"]), datetime.min.time())
    bos = make_bos_model_dir(tmp_path_factory.mktemp("model") / "bos")
    return {
        "tiny": PromptEncoder.load(tiny_model_path()),
        "slow": PromptEncoder.load(tiny_model_path(), fast="off"),
        "bos": PromptEncoder.load(bos, clock=lambda: day),
    }


@pytest.fixture
def tiny(encoders):
    return encoders["tiny"]


def ids(encoder, request):
    return [list(prompt) for prompt in encoder.encode(request).prompts]


def reason(encoder, request):
    with pytest.raises(Unsupported) as caught:
        encoder.encode(request)
    return caught.value.reason


@pytest.mark.parametrize("name", ["tiny", "slow", "bos"])
@pytest.mark.parametrize(("kind", "case"), RECORDED_CASES)
def test_ids_are_those_recorded_from_the_engine(encoders, name, kind, case):
    request = parsed(KINDS[kind][0], request_body(kind, KINDS[kind][1][case]))
    recorded = RECORDED["tiny" if name == "slow" else name][kind][case]
    assert digests(encoders[name].encode(request).prompts) == recorded


def test_every_case_is_recorded():
    for name in ("tiny", "bos"):
        for kind, (_, cases) in KINDS.items():
            assert RECORDED[name][kind].keys() == cases.keys()


def test_pitfall_21_all_four_shapes(tiny):
    assert ids(tiny, completion("ab")) == ids(tiny, completion(["ab"]))
    assert len(ids(tiny, completion(["a", "b"]))) == 2
    assert ids(tiny, completion([1, 2, 3])) == [[1, 2, 3]]
    assert ids(tiny, completion([[1, 2], [3]])) == [[1, 2], [3]]
    assert tiny.encode(completion([[1, 2], [3]])).total == 3


def test_pitfall_23_schema_keys_keep_their_order(tiny):
    schema = {"z": 0, "a": {"y": 1, "b": 2}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert '"parameters": {"z": 0, "a": {"y": 1, "b": 2}}' in tiny.render(chat(user("q"), tools=[tool]))


def test_pitfall_27_the_same_dialogue_through_both_apis_has_the_same_ids(tiny):
    turns = [user("w?"), assistant("hm"), user("so?")]
    anthropic = parsed("/v1/messages", {"system": "s", "messages": turns, "max_tokens": 5})
    assert ids(tiny, anthropic) == ids(tiny, chat(system("s"), *turns))
    blocks = [{**turn, "content": [text(turn["content"])]} for turn in turns]
    anthropic = parsed("/v1/messages", {"system": [text("s")], "messages": blocks, "max_tokens": 5})
    assert ids(tiny, anthropic) == ids(tiny, chat(system("s"), *turns))


def test_pitfall_28_a_second_turn_extends_the_first(tiny):
    first = ids(tiny, chat(user("q")))[0]
    second = ids(tiny, chat(user("q"), assistant("a"), user("r")))[0]
    assert second[: len(first)] == first
    assert len(second) > len(first)


def test_pitfall_29_text_and_a_text_part_have_the_same_ids(tiny):
    assert ids(tiny, chat(user("Hello"))) == ids(tiny, chat(user([text("Hello")])))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"image_url": "x"},
    ],
)
def test_pitfall_30_media_is_not_guessed(tiny, part):
    assert reason(tiny, chat(user([text("see"), part, text("this")]))) == "multimodal"


def test_pitfall_30_media_in_an_anthropic_body_is_not_guessed(tiny):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    for content in ([image], [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]):
        body = {"messages": [user(content)], "max_tokens": 5}
        assert reason(tiny, parsed("/v1/messages", body)) == "multimodal"


def test_pitfall_35_and_36_exactly_one_bos(encoders):
    bos = encoders["bos"]
    (number,) = bos.encode(completion("<|bos|>", add_special_tokens=False)).prompts[0]
    for request in (completion("hi"), chat(user("hi"))):
        (prompt,) = ids(bos, request)
        assert prompt[0] == number
        assert prompt.count(number) == 1


def test_pitfall_37_salts_separate_equal_prompts(tiny):
    chains = []
    for salt in ("a", "b", None):
        request = chat(user("word " * 200), cache_salt=salt)
        seed = Namespace("m", tiny.tokenizer_revision, None, request.cache_salt).seed
        chains.append(prompt_chain(tiny.encode(request).prompts[0], 16, seed))
    assert len(chains[0]) > 2
    assert not set(chains[0]) & set(chains[1])
    assert not (set(chains[0]) | set(chains[1])) & set(chains[2])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (chat(), "message-shape"),
        (chat("text"), "message-shape"),
        (chat({"content": "x"}), "message-shape"),
        (chat(user(None)), "message-shape"),
        (chat(user(5)), "message-shape"),
        (chat(user([5])), "message-shape"),
        (chat(user([{"type": "text"}])), "message-shape"),
        (chat(user([{"text": "no type"}])), "message-shape"),
        (chat(user("x", name=5)), "message-shape"),
        (chat(assistant("x", tool_calls="x")), "message-shape"),
        (chat(assistant("x", tool_calls=[{"id": "c", "type": "custom"}])), "message-shape"),
        (chat(assistant("x", tool_calls=[call("c", "f", {})])), "message-shape"),
        (chat({"role": "developer", "content": "x", "tools": [1]}), "message-shape"),
        (chat(user("x"), tools=[]), "tool-shape"),
        (chat(user("x"), tools={"a": 1}), "tool-shape"),
        (chat(user("x"), tools=[{"type": "web_search"}]), "tool-shape"),
        (chat(user("x"), tools=[{"type": "function"}]), "tool-shape"),
        (chat(user("x"), tools=[{"function": {"name": "f", "parameters": []}}]), "tool-shape"),
        (chat(user("x"), tools=[{"function": {"name": "f"}, "defer_loading": 1}]), "tool-shape"),
        (chat(user("x"), chat_template="{{ 1 }}"), "request-template"),
        (chat(user("x"), chat_template_kwargs={"chat_template": "x"}), "template-kwargs"),
        (chat(user("x"), chat_template_kwargs={"messages": []}), "template-kwargs"),
        (chat(user("x"), chat_template_kwargs=[1]), "template-kwargs"),
        (chat(user("x"), reasoning_effort="extreme"), "field-type"),
        (chat(user("x"), documents=[{"n": 1}]), "field-type"),
        (chat(user("x"), add_generation_prompt="yes"), "field-type"),
        (chat(user("x"), continue_final_message=True), "template-error"),
        (chat(user("x"), truncate_prompt_tokens=-1), "truncation"),
        (chat(user("x"), truncate_prompt_tokens=2, truncation_side="middle"), "truncation"),
        (chat(user("\ud800")), "text"),
        (chat(user("x"), kv_transfer_params={"prompt_token_ids": ["a"]}), "prompt-shape"),
        (chat(user("x"), kv_transfer_params={"prompt_token_ids": []}), "empty-prompt"),
        (completion(None), "prompt-shape"),
        (completion({"a": 1}), "prompt-shape"),
        (completion([True, 2]), "prompt-shape"),
        (completion([1, -2]), "prompt-shape"),
        (completion([[1], "x", 5]), "prompt-shape"),
        (completion([1, 2**40]), "prompt-shape"),
        (completion(""), "empty-prompt"),
        (completion([]), "empty-prompt"),
        (completion(["x", ""]), "empty-prompt"),
        (completion("\ud800"), "text"),
        (completion("x", suffix="y"), "suffix"),
        (completion("x", prompt_embeds="AA"), "prompt-embeds"),
        (completion("x", add_special_tokens=1), "field-type"),
        (completion("\ud800", truncate_prompt_tokens=3), "text"),
    ],
)
def test_what_cannot_be_rendered_surely_is_unsupported(tiny, request_, expected):
    assert reason(tiny, request_) == expected


def test_deep_arguments_are_unsupported(tiny):
    deep = "[" * 5000 + "]" * 5000
    assert reason(tiny, chat(assistant("", tool_calls=[call("c", "f", deep)]))) == "too-deep"


def test_bodies_with_media_ignore_forwarded_ids(tiny):
    image = {"type": "image_url", "image_url": {"url": "x"}}
    request = chat(user([image]), kv_transfer_params={"prompt_token_ids": [1, 2]})
    assert reason(tiny, request) == "multimodal"


def test_tools_can_be_left_out_when_the_choice_is_none():
    encoder = PromptEncoder.load(tiny_model_path(), exclude_tools_when_tool_choice_none=True)
    plain = ids(encoder, chat(user("q")))
    assert ids(encoder, chat(user("q"), tools=[WEATHER], tool_choice="none")) == plain
    assert ids(encoder, chat(user("q"), tools=[WEATHER], tool_choice="auto")) != plain
    tool = {"name": "f", "input_schema": {}}
    body = {"messages": [user("q")], "tools": [tool], "tool_choice": {"type": "none"}, "max_tokens": 1}
    assert ids(encoder, parsed("/v1/messages", body)) == plain
    function = {"type": "function", "name": "f", "parameters": {}}
    assert (
        ids(encoder, parsed("/v1/responses", {"input": "q", "tools": [function], "tool_choice": "none"}))
        == plain
    )


def test_default_template_arguments_apply_unless_the_request_says_otherwise():
    encoder = PromptEncoder.load(tiny_model_path(), template_kwargs={"enable_thinking": False})
    assert "<think>" in encoder.render(chat(user("q")))
    assert "<think>" not in encoder.render(chat(user("q"), chat_template_kwargs={"enable_thinking": True}))


def test_a_given_template_replaces_the_models(tmp_path, tiny):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}!")
    for template in (path, str(path), "{{ messages[0].content }}!"):
        encoder = PromptEncoder.load(tiny_model_path(), chat_template=template)
        assert encoder.render(chat(user("q"))) == "q!"
        assert encoder.tokenizer_revision != tiny.tokenizer_revision


def test_a_content_format_can_be_forced():
    encoder = PromptEncoder.load(
        tiny_model_path(), chat_template="{{ messages[0].content }}", content_format="openai"
    )
    assert encoder.render(chat(user("q"))) == "[{'type': 'text', 'text': 'q'}]"


def test_without_a_clock_a_template_that_prints_the_date_is_unsupported(tmp_path):
    encoder = PromptEncoder.load(make_bos_model_dir(tmp_path / "bos"))
    assert reason(encoder, chat(user("q"))) == "template-clock"
    assert encoder.templates["default"].volatile


def test_without_a_template_only_completions_are_encoded(tmp_path):
    path = make_model_dir(tmp_path / "m", tiny_model_path(), {"chat_template": None})
    encoder = PromptEncoder.load(path)
    assert reason(encoder, chat(user("q"))) == "no-chat-template"
    assert ids(encoder, completion("q"))


def test_a_broken_template_leaves_completions(tmp_path):
    encoder = PromptEncoder.load(tiny_model_path(), chat_template="{% if %}")
    assert reason(encoder, chat(user("q"))) == "template-syntax"
    assert ids(encoder, completion("q"))


def test_models_that_the_engine_renders_with_code_are_unsupported(tmp_path):
    path = make_model_dir(tmp_path / "m", tiny_model_path())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["GptOssForCausalLM"]}))
    encoder = PromptEncoder.load(path)
    assert reason(encoder, chat(user("q"))) == "renderer"
    assert ids(encoder, completion("q"))
    (path / "tekken.json").touch()
    (path / "consolidated.safetensors").touch()
    assert reason(PromptEncoder.load(path), completion("q")) == "renderer"


def test_completions_have_nothing_to_render(tiny):
    with pytest.raises(Unsupported):
        tiny.render(completion("q"))


def test_the_request_is_left_as_it_was(tiny):
    body = {
        "messages": [user([text("q")]), assistant("a", tool_calls=[call("c", "f", "{}")])],
        "tools": [WEATHER],
    }
    request = parsed("/v1/chat/completions", body)
    before = json.dumps(request.body)
    tiny.encode(request)
    assert json.dumps(request.body) == before


def test_a_tool_choice_that_is_no_object_is_unsupported(tiny):
    body = {"messages": [user("x")], "max_tokens": 1, "tool_choice": 1}
    assert reason(tiny, parsed("/v1/messages", body)) == "field-type"
