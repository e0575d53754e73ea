"""Namespaces in a real vLLM: tenants, salts and adapters share exactly what we say they share."""

import random

import pytest

from extproc.demo.workload import prose
from tests.support.full_stack import FullStack, Worker
from tests.support.lora import write_lora
from tests.support.vllm import ReplicaSpec

pytestmark = [pytest.mark.vllm, pytest.mark.envoy, pytest.mark.timeout(600)]

DOCUMENT_WORDS = 400


def workers_of(replicas):
    return [Worker(r.endpoint, r.kv_events, r.kv_replay) for r in replicas]


async def cached(stack, document, *, tenant=None, model="tiny", **fields):
    """Cached tokens of one request: as predicted, and as the engine says."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": document}],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }
    reply = await stack.post("/v1/chat/completions", body, {} if tenant is None else {"x-tenant": tenant})
    assert reply.status == 200, reply.body
    entry = await stack.decision(reply.request_id)
    actual = (reply.usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    assert entry["actual_cached_tokens"] == actual
    return entry["predicted_cached_tokens"], actual, entry


async def test_shared_tenants_hit_each_others_prefixes_and_salted_ones_only_their_own(vllm_pool, tmp_path):
    (replica,) = vllm_pool.start(ReplicaSpec())
    key = tmp_path / "salt.key"
    key.write_text("k" * 40)
    tenants = {
        "identity": [{"header": "x-tenant"}],
        "salt_key": {"file": str(key)},
        "policies": {
            "one": {},
            "two": {},
            "apart": {"isolation": "salted"},
            "aside": {"isolation": "salted"},
        },
    }
    async with FullStack(tmp_path, workers_of([replica]), settings={"tenants": tenants}) as stack:
        await stack.until_subscribed(1)
        document = prose(random.Random(1), DOCUMENT_WORDS)

        async def ask(tenant, **fields):
            predicted, actual, entry = await cached(stack, document, tenant=tenant, **fields)
            assert predicted == actual, (tenant, fields, entry)
            return actual

        assert await ask("one") == 0
        warm = await ask("two")  # another tenant's prompt, and a hit: the cache is shared
        assert warm > 300
        for tenant in ("apart", "aside"):
            assert await ask(tenant) == 0  # in our prediction and in the engine
            assert await ask(tenant) == warm
        # A salt of the client's own keeps its prompts apart within its tenant, and from everyone else.
        assert await ask("apart", cache_salt="mine") == 0
        assert await ask("apart", cache_salt="mine") == warm
        assert await ask("aside", cache_salt="mine") == 0
        assert await ask("one", cache_salt="mine") == 0
        assert await ask("one") == warm
        keys = {entry["prefix_key"] for entry in stack.log_entries().values()}
        assert {len(key.split(":")[0]) for key in keys} == {16}
        assert len({key.split(":")[0] for key in keys}) == 7  # two shared, and five that no other can hit
    replica.kill()


async def test_adapters_the_base_model_and_a_salt_of_an_adapters_name_are_four_namespaces(
    vllm_pool, tmp_path
):
    ada, bob, eve = (write_lora(tmp_path / name, seed) for seed, name in enumerate(("ada", "bob", "eve")))
    with_adapters = ReplicaSpec(
        extra_args=(
            *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"),
            *("--lora-modules", f"ada={ada}", f"bob={bob}"),
        )
    )
    replicas = vllm_pool.start(with_adapters, with_adapters)
    settings = {"unknown_model": "refuse", "scrape": {"interval_s": 0.3, "models_interval_s": 0.3}}
    async with FullStack(tmp_path, workers_of(replicas), settings=settings) as stack:
        await stack.until_subscribed(2)
        document = prose(random.Random(2), DOCUMENT_WORDS)
        spaces = {
            "base": {},
            "ada": {"model": "ada"},
            "bob": {"model": "bob"},
            "salt": {"cache_salt": "ada"},
            "both": {"model": "ada", "cache_salt": "ada"},
        }
        where, warm = {}, 0
        for name, fields in spaces.items():
            predicted, actual, entry = await cached(stack, document, **fields)
            assert (predicted, actual) == (0, 0), name  # nothing of the others is credited
            assert entry["adapter"] == fields.get("model")
            where[name] = entry["selected_worker"]
        for name, fields in spaces.items():
            predicted, actual, entry = await cached(stack, document, **fields)
            assert predicted == actual > 300, name
            assert entry["selected_worker"] == where[name]
            warm = actual

        # Loaded at run time, on one of the two: its requests go there, and nowhere else.
        assert (
            replicas[1].request("POST", "/v1/load_lora_adapter", {"lora_name": "eve", "lora_path": str(eve)})[
                0
            ]
            == 200
        )
        for _ in range(600):
            reply = await stack.post("/v1/completions", {"model": "eve", "prompt": "hello", "max_tokens": 1})
            if reply.status == 200:
                break
            assert reply.status == 404
        assert reply.status == 200
        for number in range(6):
            predicted, actual, entry = await cached(
                stack, document if number < 2 else f"{number}", model="eve"
            )
            assert entry["selected_worker"] == replicas[1].endpoint
            assert predicted == actual == (warm if number == 1 else 0)

        # And unloaded again: nobody has it.
        assert replicas[1].request("POST", "/v1/unload_lora_adapter", {"lora_name": "eve"})[0] == 200
        for _ in range(600):
            reply = await stack.post("/v1/completions", {"model": "eve", "prompt": "hello", "max_tokens": 1})
            if b"model_not_found" in reply.body:
                break
        assert b"model_not_found" in reply.body
    for replica in replicas:
        replica.kill()
