import json
from array import array
from typing import Any

import pytest

from extproc.adapters.sim_engine_requests import RefusedError, RequestReader
from extproc.adapters.sim_engine_text import Vocabulary
from extproc.prompt.errors import Unsupported
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import InferenceRequest
from extproc.sim.engine_types import EngineConfig

VOCABULARY = Vocabulary.load(tiny_model_path())
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def encode(request: InferenceRequest) -> "tuple[array[int], ...]":
    prompt = request.body.get("prompt", [1, 2, 3])
    if prompt == "unsupported":
        raise Unsupported("multimodal")
    return (array("I", prompt),)


def read(path: str, body: dict[str, Any], **options: Any) -> Any:
    config = EngineConfig(max_model_len=100)
    reader = RequestReader(
        config,
        encode,
        VOCABULARY,
        models=("m", "alias"),
        adapters=("lora",),
        mean_output_tokens=10,
        **options,
    )
    return reader.generation(path, {}, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": 7}, 7),
        (CHAT, {"max_tokens": 7}, 7),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 5}, 5),
        (CHAT, {}, 97),
        ("/v1/responses", {"max_output_tokens": 4}, 4),
        ("/v1/messages", {"max_tokens": 3}, 3),
    ],
)
def test_every_endpoint_has_its_own_output_limit(path: str, body: dict[str, Any], limit: int) -> None:
    (sequence,) = read(path, {"prompt": [1, 2, 3], "ignore_eos": True, **body}).sequences
    assert sequence.request.output_tokens == limit
    assert sequence.request.finish_reason == "length"


def test_choices_differ_but_each_is_reproducible() -> None:
    body = {"prompt": [1, 2, 3], "n": 3, "max_tokens": 20, "ignore_eos": True}
    first, again = (read(COMPLETIONS, body) for _ in range(2))
    texts = ["".join(sequence.answer.pieces) for sequence in first.sequences]
    assert len(set(texts)) == 3
    assert texts == ["".join(sequence.answer.pieces) for sequence in again.sequences]
    assert len({sequence.request.request_id for sequence in first.sequences}) == 3


def test_a_seed_changes_the_answer() -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
    answers = [read(COMPLETIONS, {**body, "seed": seed}).sequences[0].answer.token_ids for seed in (0, -1, 5)]
    assert len({tuple(answer) for answer in answers}) == 3


def test_only_adapters_are_in_the_block_hashes_not_names_of_the_model() -> None:
    hashes = {}
    for model in ("m", "alias", "lora"):
        prepared = read(COMPLETIONS, {"model": model, "prompt": list(range(40)), "max_tokens": 1})
        hashes[model] = prepared.sequences[0].request.block_hashes
        assert prepared.sequences[0].request.adapter == ("lora" if model == "lora" else None)
    assert hashes["m"] == hashes["alias"] != hashes["lora"]


def test_usage_is_streamed_if_the_client_or_the_server_wants_it() -> None:
    assert not read(COMPLETIONS, {"prompt": [1]}).include_usage
    assert not read(COMPLETIONS, {"prompt": [1], "stream_options": {"include_usage": False}}).include_usage
    assert read(COMPLETIONS, {"prompt": [1], "stream_options": {"include_usage": True}}).include_usage
    assert read(COMPLETIONS, {"prompt": [1]}, force_include_usage=True).include_usage


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "who"}, 404, "model"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"max_tokens": 98}, 400, "max_tokens"),
        ({"prompt": [1] * 100}, 400, "input_tokens"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": "unsupported"}, 400, None),
        ({"seed": "x"}, 400, "seed"),
        ({"min_tokens": -1}, 400, "min_tokens"),
        ({"n": 0}, 400, "n"),
        ({"cache_salt": 5}, 400, None),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], status: int, param: str | None) -> None:
    with pytest.raises(RefusedError) as refused:
        read(COMPLETIONS, {"prompt": [1, 2, 3], **body})
    error = refused.value.body()["error"]
    assert (refused.value.status, error["code"], error["param"]) == (status, status, param)
