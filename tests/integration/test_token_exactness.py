"""Our token ids are real vLLM's, for every prompt case, on the tiny tokenizer and on real ones."""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import InferenceRequest, parse_request
from tests.support.engine_ids import KINDS, SERVE_ARGS, engine_ids, request_body, served_tokens
from tests.support.models import make_bos_model_dir, make_model_dir
from tests.support.vllm import Replica, ReplicaSpec, VllmPool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODELS = ("tiny", "bos", "qwen3", "llama3_1", "deepseek_v3")
# Cases that templates of some models refuse; everything else every engine here must accept.
REFUSABLE = {
    "chat": {"custom-role", "late-system", "two-systems", "developer-late"},
}
MAX_MODEL_LEN = 8192

Served = dict[str, tuple[Path, Replica]]


@pytest.fixture(scope="module")
def served(vllm_pool: VllmPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("models")
    dirs = {"tiny": tiny_model_path(), "bos": make_bos_model_dir(scratch / "bos")}
    tokenizers = os.environ.get("WARMROUTE_TOKENIZERS_DIR")
    for name in MODELS[2:]:
        if tokenizers and (Path(tokenizers) / name / "tokenizer.json").exists():
            # DeepSeek's own model type makes transformers ignore the class its configuration names.
            changes = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "deepseek_v3" else None
            dirs[name] = make_model_dir(scratch / name, Path(tokenizers) / name, changes)
    replicas = vllm_pool.start(
        *[
            ReplicaSpec(model_dir=path, max_model_len=MAX_MODEL_LEN, extra_args=SERVE_ARGS)
            for path in dirs.values()
        ]
    )
    yield {name: (dirs[name], replica) for name, replica in zip(dirs, replicas, strict=True)}
    for replica in replicas:
        replica.kill()


def model(served: Served, name: str) -> tuple[PromptEncoder, Replica]:
    if name not in served:
        pytest.skip(
            f"no tokenizer {name}: run `.ci/install-tokenizers.sh DIR`, set WARMROUTE_TOKENIZERS_DIR=DIR"
        )
    path, replica = served[name]
    return PromptEncoder.load(path, clock=datetime.now), replica


def parsed(kind: str, case: dict) -> InferenceRequest:
    request = parse_request("POST", KINDS[kind][0], {}, json.dumps(request_body(kind, case)).encode())
    assert isinstance(request, InferenceRequest)
    return request


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_ids_are_the_engines(served, name, kind):
    encoder, replica = model(served, name)
    refused, wrong = set(), {}
    for case, body in KINDS[kind][1].items():
        expected = engine_ids(replica, kind, body)
        if isinstance(expected, str):
            refused.add(case)
            continue
        actual = [list(ids) for ids in encoder.encode(parsed(kind, body)).prompts]
        if actual != expected:
            wrong[case] = (expected, actual)
    assert not wrong
    assert refused <= REFUSABLE.get(kind, set())


@pytest.mark.parametrize("kind", ["responses", "messages"])
@pytest.mark.parametrize("name", MODELS)
def test_the_serving_endpoint_counts_as_many_tokens_as_the_rendering_one(served, name, kind):
    encoder, replica = model(served, name)
    for case, body in KINDS[kind][1].items():
        ours = encoder.encode(parsed(kind, body)).total
        assert served_tokens(replica, kind, body) == ours, case


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_tokenize_gives_the_same_ids(served, name):
    encoder, replica = model(served, name)
    fields = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    compared = 0
    for case, body in KINDS["chat"][1].items():
        if not set(body) <= set(fields):
            continue
        answer = replica.post("/tokenize", {"model": "tiny", **body})
        assert answer["tokens"] == list(encoder.encode(parsed("chat", body)).prompts[0]), case
        compared += 1
    assert compared > 50


def test_pitfall_35_and_36_llama_prompts_have_exactly_one_bos(served):
    encoder, replica = model(served, "llama3_1")
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for kind, case in (("chat", chat), ("completion", {"prompt": "hi"})):
        (ids,) = encoder.encode(parsed(kind, case)).prompts
        assert [list(ids)] == engine_ids(replica, kind, case)
        assert list(ids).count(128000) == 1
        assert ids[0] == 128000


def test_rendered_responses_get_a_second_bos_as_in_the_engine(served):
    encoder, replica = model(served, "llama3_1")
    (ids,) = encoder.encode(parsed("responses", {"input": "hi"})).prompts
    assert list(ids[:2]) == [128000, 128000]
    assert [list(ids)] == engine_ids(replica, "responses", {"input": "hi"})
