import json
import shutil
from contextlib import AsyncExitStack

import pytest
import yaml

from extproc import config as configuration
from extproc.config import ConfigError
from extproc.pool_contexts import PoolContexts
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import parse_request

TINY = {"path": str(tiny_model_path()), "names": ["m"], "revision": "v1"}


def pools(*given):
    described = [{"discovery": {"static": [f"10.0.0.{n}:1"]}, **pool} for n, pool in enumerate(given)]
    return PoolContexts(configuration.parse(yaml.safe_dump({"pools": described})))


async def opened(made, ready=lambda _pool: None):
    said, cleanup = [], AsyncExitStack()
    return made.open(cleanup, ready, said.append), said, cleanup


async def test_a_pool_with_a_model_encodes_and_one_without_is_routed_by_load():
    made = pools({"name": "a", "model": TINY}, {"name": "b", "block_size": 32})
    contexts, said, cleanup = await opened(made)
    async with cleanup:
        assert list(contexts) == ["a", "b"]
        request = parse_request("POST", "/v1/completions", {}, b'{"model": "m", "prompt": "one two"}')
        encoded = await contexts["a"].prompts.encode(request)
        assert len(encoded.prompts[0]) > 0
        assert contexts["b"].prompts is None
    assert said[0].startswith("pool a: encoding with ")
    assert said[1] == "pool b: no model path, so requests are routed by load only"
    assert list(made.prompt_caches()) == ["a"]


async def test_a_pool_that_renders_no_chats_says_so_unless_workers_are_asked(tmp_path):
    shutil.copy(tiny_model_path() / "tokenizer.json", tmp_path)
    bare = {"path": str(tmp_path)}
    made = pools(
        {"name": "a", "model": bare}, {"name": "b", "model": {**bare, "worker_tokenize": "tokenize"}}
    )
    _, said, cleanup = await opened(made)
    async with cleanup:
        assert [line for line in said if "no chat" in line] == [
            "pool a: no chat is rendered here (no-chat-template): they are routed by load only"
        ]


async def test_facts_and_context_of_a_pool_say_the_same():
    made = pools({"name": "a", "model": TINY})
    contexts, _, cleanup = await opened(made)
    async with cleanup:
        context, facts = contexts["a"], made.facts["a"]
        assert context.model_revision == facts.model_revision == "v1"
        assert context.tokenizer_revision == facts.tokenizer_revision != ""
        assert (context.base_models, context.revisions, facts.tokenizer_revisions) == ({"m"}, {}, {})


async def test_a_revision_with_files_of_its_own_has_an_encoder_of_its_own(tmp_path):
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    revisions = [{"revision": "v2", "chat_template": str(template)}, {"revision": "v3"}]
    made = pools({"name": "a", "model": {**TINY, "revisions": revisions}})
    contexts, _, cleanup = await opened(made)
    async with cleanup:
        assert set(contexts["a"].revisions) == set(made.facts["a"].tokenizer_revisions) == {"v2"}
        assert contexts["a"].revisions["v2"][1] is not contexts["a"].prompts
    assert len(made.own_caches()["a"]) == 2
    assert len(made.prompt_caches()["a"]) == 4  # and what other processes have of each


async def test_who_is_asked_to_tokenize_is_a_ready_worker_of_the_pool():
    asked = []

    def ready(pool):
        asked.append(pool)

    made = pools({"name": "a", "model": {**TINY, "worker_tokenize": "tokenize"}})
    contexts, _, cleanup = await opened(made, ready)
    async with cleanup:
        both = {"continue_final_message": True, "add_generation_prompt": True}  # no template does both
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}], **both}).encode()
        request = parse_request("POST", "/v1/chat/completions", {}, body)
        answer = await contexts["a"].prompts.encode(request)
        assert answer.reason.startswith("unsupported:")
    assert asked == ["a"]


def test_a_model_that_cannot_be_used_is_said_at_once():
    with pytest.raises(ConfigError, match="pool a: model path /none is not a folder"):
        pools({"name": "a", "model": {"path": "/none"}})
