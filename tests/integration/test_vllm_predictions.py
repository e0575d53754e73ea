"""Predicted cached tokens against a real vLLM's own account, through a real Envoy."""

import asyncio
import json
import random

import pytest

from extproc.demo.workload import prose
from extproc.protocol.openai import parse_request
from tests.support.full_stack import FullStack, Worker
from tests.support.vllm import MODEL_NAME, ReplicaSpec

pytestmark = [pytest.mark.vllm, pytest.mark.envoy, pytest.mark.timeout(600)]


_LONGEST_CHAT = 20  # messages; the smallest engines hold about 3,000 tokens


def workers_of(replicas):
    return [Worker(r.endpoint, r.kv_events, r.kv_replay) for r in replicas]


class Traffic:
    """Documents with questions, chats of several turns, unique prompts; streaming and not."""

    def __init__(self, seed, document_words=900):
        self.rng = random.Random(seed)
        self.documents = [prose(self.rng, document_words) for _ in range(5)]
        self.chats = [[{"role": "system", "content": prose(self.rng, 60)}] for _ in range(4)]

    async def one(self, stack, chat=None):
        rng, stream = self.rng, self.rng.random() < 0.5
        kind = rng.random()
        if kind < 0.45:
            question = [
                {"role": "system", "content": rng.choice(self.documents)},
                {"role": "user", "content": prose(rng, 12)},
            ]
            return await stack.chat(question, stream=stream)
        if kind < 0.75:
            history = chat if chat is not None else rng.choice(self.chats)
            if len(history) > _LONGEST_CHAT:
                history[:] = [{"role": "system", "content": prose(rng, 60)}]
            history.append({"role": "user", "content": prose(rng, 30)})
            reply = await stack.chat(list(history), stream=stream, max_tokens=40)
            history.append({"role": "assistant", "content": reply.text})
            return reply
        if kind < 0.9:
            return await stack.chat(prose(rng, rng.randint(5, 400)), stream=stream)
        return await stack.complete([rng.randint(300, 2000) for _ in range(rng.randint(1, 300))])


async def compare(stack, replies):
    """(equal, all): predictions against what the engine said to the client."""
    equal, differ = 0, []
    for reply in replies:
        assert reply.status == 200, reply.body
        entry = await stack.decision(reply.request_id)
        actual = (reply.usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert entry["actual_cached_tokens"] == actual, (entry, reply.body)
        assert entry["prompt_tokens"] == reply.usage["prompt_tokens"]
        if entry["predicted_cached_tokens"] == actual:
            equal += 1
        else:
            differ.append((entry["predicted_cached_tokens"], actual, entry["selected_worker"]))
    return equal, differ


async def test_sixty_mixed_requests_are_predicted_exactly(vllm_pool, tmp_path):
    replicas = vllm_pool.start(*[ReplicaSpec()] * 3)
    async with FullStack(tmp_path, workers_of(replicas)) as stack:
        await stack.until_subscribed(3)
        traffic = Traffic(seed=1)
        replies = [await traffic.one(stack) for _ in range(60)]
        equal, differ = await compare(stack, replies)
        assert (equal, differ) == (60, [])
        hits = [r for r in replies if (r.usage["prompt_tokens_details"] or {}).get("cached_tokens")]
        assert len(hits) > 25
        used = {entry["selected_worker"] for entry in stack.log_entries().values()}
        assert len(used) == 3

    for replica in replicas:
        replica.kill()


async def test_an_engine_reads_no_cache_where_its_prompts_logprobs_are_asked_for(vllm_replicas):
    prompt = {"model": MODEL_NAME, "prompt": "Echo what is here. " * 40, "max_tokens": 1}
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": prompt["prompt"]}], "max_tokens": 1}
    logprobs = [{}, {"logprobs": 1}, {"echo": True}, {"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}]
    for path, body in (("/v1/completions", prompt), ("/v1/chat/completions", chat)):
        vllm_replicas[0].post(path, body)  # from now on it is cached
        for fields in logprobs:
            asked = {
                **body,
                **fields,
                **({"logprobs": True} if "logprobs" in fields and body is chat else {}),
            }
            parsed = parse_request("POST", path, {}, json.dumps(asked).encode())
            usage = vllm_replicas[0].post(path, asked)["usage"]
            assert parsed.reads_cache is (usage["prompt_tokens_details"]["cached_tokens"] > 0), asked


async def test_three_hundred_requests_under_eviction(vllm_pool, tmp_path):
    # About one and a half documents fit on a replica, so every other request evicts.
    replicas = vllm_pool.start(*[ReplicaSpec(num_gpu_blocks_override=96)] * 3)
    async with FullStack(tmp_path, workers_of(replicas)) as stack:
        await stack.until_subscribed(3)
        traffic = Traffic(seed=2)
        replies = [await traffic.one(stack) for _ in range(300)]
        equal, differ = await compare(stack, replies)
        assert equal >= 297, differ

    for replica in replicas:
        replica.kill()


async def test_at_concurrency_eight(vllm_pool, tmp_path):
    replicas = vllm_pool.start(*[ReplicaSpec()] * 3)
    async with FullStack(tmp_path, workers_of(replicas)) as stack:
        await stack.until_subscribed(3)
        traffic = Traffic(seed=3)

        async def user(number):
            own_chat = [{"role": "system", "content": f"You are user {number}. {prose(traffic.rng, 60)}"}]
            return [await traffic.one(stack, own_chat) for _ in range(25)]

        replies = [reply for mine in await asyncio.gather(*(user(n) for n in range(8))) for reply in mine]
        equal, differ = await compare(stack, replies)
        assert equal >= 0.95 * len(replies), differ

    for replica in replicas:
        replica.kill()
