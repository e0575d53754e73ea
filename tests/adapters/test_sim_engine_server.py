import asyncio
import json
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.core.errors import WarmrouteError
from extproc.core.hashing import chain
from extproc.protocol.engine_metrics import parse_engine_metrics
from extproc.sim.time_model import PRESETS, TimeModel
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until

SLOW = TimeModel(50.0, 0.0, 0.0, 0.0, 0.0)
"""50 ms a step."""


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield session


async def post(
    session: aiohttp.ClientSession, engine: SimEngine, path: str, body: Any, status: int = 200
) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(f"{engine.base_url}{path}", data=data) as reply:
        text = await reply.text()
        assert reply.status == status, text
        return json.loads(text) if text else {}


async def complete(
    session: aiohttp.ClientSession, engine: SimEngine, prompt: Any, **options: Any
) -> dict[str, Any]:
    return await post(session, engine, "/v1/completions", {"model": "tiny", "prompt": prompt, **options})


async def stream(
    session: aiohttp.ClientSession, engine: SimEngine, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    async with session.post(f"{engine.base_url}{path}", json={**body, "stream": True}) as reply:
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in reply.content if line.startswith(b"data: ")]
    return [json.loads(line[6:]) for line in lines if line != b"data: [DONE]\n"]


async def page(session: aiohttp.ClientSession, engine: SimEngine) -> str:
    async with session.get(f"{engine.base_url}/metrics") as reply:
        assert reply.status == 200
        return await reply.text()


# --- generating --------------------------------------------------------------------------------------------


async def test_a_completion_reports_what_the_cache_had(session: aiohttp.ClientSession) -> None:
    async with SimEngine(block_size=16) as engine:
        prompt = list(range(100, 150))
        first = await complete(session, engine, prompt, max_tokens=4, ignore_eos=True)
        again = await complete(session, engine, prompt, max_tokens=4, ignore_eos=True)
    assert first["object"] == "text_completion"
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["usage"] == {
        "prompt_tokens": 50,
        "completion_tokens": 4,
        "total_tokens": 54,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


@pytest.mark.parametrize("size", [16, 32, 64])
async def test_blocks_have_the_configured_size(session: aiohttp.ClientSession, size: int) -> None:
    async with SimEngine(block_size=size) as engine:
        prompt = list(range(100, 100 + 150))
        await complete(session, engine, prompt)
        again = await complete(session, engine, prompt)
        metrics = parse_engine_metrics(await page(session, engine))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 149 // size * size
    assert [engine.block_size for engine in metrics.values()] == [size]


async def test_all_four_shapes_of_a_prompt(session: aiohttp.ClientSession) -> None:
    async with SimEngine() as engine:
        for prompt, choices in (
            ("some text", 1),
            (["some text", "more text"], 2),
            ([5, 6, 7], 1),
            ([[5, 6], [7, 8, 9]], 2),
        ):
            answer = await complete(session, engine, prompt, n=2, max_tokens=3, return_token_ids=True)
            assert [choice["index"] for choice in answer["choices"]] == list(range(2 * choices))
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5, 6]] * 2 + [[7, 8, 9]] * 2
        assert all(0 < len(choice["token_ids"]) <= 3 for choice in answer["choices"])
        assert answer["usage"]["prompt_tokens"] == 5


async def test_every_turn_of_a_chat_finds_the_turns_before_it_and_their_answers(
    session: aiohttp.ClientSession,
) -> None:
    async with SimEngine(block_size=16, mean_output_tokens=30.0) as engine:
        messages: list[dict[str, str]] = [{"role": "system", "content": "You answer. " * 20}]
        known = 0
        for turn in range(6):
            messages.append({"role": "user", "content": f"Question number {turn}, in a few words."})
            body = {"model": "tiny", "messages": messages, "max_tokens": 50, "return_token_ids": True}
            answer = await post(session, engine, "/v1/chat/completions", body)
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == known
            # All but the last token of prompt and answer have been computed.
            known = (usage["total_tokens"] - 1) // 16 * 16
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


async def test_the_same_dialogue_hits_whichever_endpoint_it_comes_through(
    session: aiohttp.ClientSession,
) -> None:
    text = "A document about nothing in particular. " * 20
    async with SimEngine(block_size=16) as engine:
        messages = [{"role": "user", "content": text}]
        chat = await post(session, engine, "/v1/chat/completions", {"messages": messages, "max_tokens": 5})
        prompt = chat["usage"]["prompt_tokens"]
        hit = (prompt - 1) // 16 * 16
        anthropic = await post(session, engine, "/v1/messages", {"messages": messages, "max_tokens": 5})
        responses = await post(session, engine, "/v1/responses", {"input": text, "max_output_tokens": 5})
    assert anthropic["usage"]["cache_read_input_tokens"] == hit
    assert anthropic["usage"]["input_tokens"] == prompt - hit
    assert anthropic["stop_reason"] in {"max_tokens", "end_turn"}
    assert anthropic["content"][0]["type"] == "text"
    assert responses["usage"]["input_tokens_details"] == {"cached_tokens": hit}
    assert responses["usage"]["input_tokens"] == prompt
    assert responses["output"][0]["content"][0]["text"] == anthropic["content"][0]["text"]


async def test_salt_and_adapter_separate_caches(session: aiohttp.ClientSession) -> None:
    async with SimEngine(adapters=("sql", "code")) as engine:
        prompt = list(range(100, 150))
        for options in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "sql"}, {"model": "code"}):
            first = await complete(session, engine, prompt, **options)
            again = await complete(session, engine, prompt, **options)
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
            assert again["model"] == options.get("model", "tiny")


async def test_an_answer_ends_by_itself_or_at_its_limit(session: aiohttp.ClientSession) -> None:
    async with SimEngine(mean_output_tokens=5.0, max_model_len=400) as engine:
        reasons = Counter()
        for seed in range(12):
            answer = await complete(session, engine, "Say something", max_tokens=6, seed=seed)
            reasons[answer["choices"][0]["finish_reason"]] += 1
        assert set(reasons) == {"stop", "length"}
        body = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
        answer = await post(session, engine, "/v1/chat/completions", body)
        assert answer["usage"]["total_tokens"] == 400


# --- streaming ---------------------------------------------------------------------------------------------


async def test_a_streamed_chat_says_what_the_whole_one_does(session: aiohttp.ClientSession) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me " * 20}], "max_tokens": 20, "n": 2}
    async with SimEngine(time=PRESETS["demo"]) as engine:
        whole = await post(session, engine, "/v1/chat/completions", body)
        events = await stream(
            session, engine, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
        )
    *chunks, last = events
    texts = ["", ""]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk.get("usage") is None
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_stream_has_usage_only_if_somebody_asks(session: aiohttp.ClientSession) -> None:
    body = {"prompt": "Hello there", "max_tokens": 3}
    async with SimEngine() as engine:
        events = await stream(session, engine, "/v1/completions", body)
        assert not any("usage" in event for event in events)
    async with SimEngine(force_include_usage=True) as engine:
        events = await stream(session, engine, "/v1/completions", body)
        assert events[-1]["usage"]["completion_tokens"] == 3
        assert events[-1]["choices"] == []


async def test_streamed_token_ids_are_the_generated_ones(session: aiohttp.ClientSession) -> None:
    body = {"prompt": [7, 8, 9], "max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
    async with SimEngine() as engine:
        whole = await complete(session, engine, **body)
        events = await stream(session, engine, "/v1/completions", body)
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert choices[0]["prompt_token_ids"] == [7, 8, 9]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


async def test_a_streamed_anthropic_message_ends_with_its_usage(session: aiohttp.ClientSession) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me " * 20}], "max_tokens": 9}
    async with SimEngine() as engine:
        whole = await post(session, engine, "/v1/messages", body)
        events = await stream(session, engine, "/v1/messages", body)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    usage = events[-2]["usage"]
    assert usage["output_tokens"] == whole["usage"]["output_tokens"]
    assert usage["cache_read_input_tokens"] == whole["usage"]["input_tokens"] // 16 * 16


async def test_a_streamed_response_ends_with_the_whole_response(session: aiohttp.ClientSession) -> None:
    body = {"input": "Tell me " * 20, "max_output_tokens": 9}
    async with SimEngine() as engine:
        whole = await post(session, engine, "/v1/responses", body)
        events = await stream(session, engine, "/v1/responses", body)
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    assert last["status"] == whole["status"]
    assert text == last["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_streamed_headers_come_long_before_the_first_token(session: aiohttp.ClientSession) -> None:
    async with SimEngine() as engine:
        engine.pause()
        body = {"prompt": "Hello", "max_tokens": 2, "stream": True}
        async with session.post(f"{engine.base_url}/v1/completions", json=body) as reply:
            assert reply.status == 200
            assert engine.model.waiting == 1
            engine.resume()
            assert b"[DONE]" in await reply.read()


# --- leaving early -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_aborts_its_request(
    session: aiohttp.ClientSession, streamed: bool
) -> None:
    async with SimEngine(time=SLOW) as engine:
        body = {"prompt": "Hello", "max_tokens": 1000, "ignore_eos": True, "n": 2, "stream": streamed}
        task = asyncio.ensure_future(stream(session, engine, "/v1/completions", body))
        await until(lambda: engine.model.running == 2)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: engine.model.running == 0)
        assert engine.model.stats.finished["abort"] == 2
        assert engine.model.pool.usage == 0.0


async def test_many_requests_at_once_all_finish_and_leave_nothing(session: aiohttp.ClientSession) -> None:
    async with SimEngine(num_gpu_blocks=40, max_num_seqs=8) as engine:
        prompts = [list(range(100 * (index % 3), 100 * (index % 3) + 200)) for index in range(40)]
        answers = await asyncio.gather(
            *(complete(session, engine, prompt, max_tokens=20, ignore_eos=True) for prompt in prompts)
        )
        assert all(answer["usage"]["completion_tokens"] == 20 for answer in answers)
        assert engine.model.pool.usage == 0.0
        assert engine.model.next_deadline() is None


# --- refusing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/completions", b'{"prompt": ', 400, "not valid JSON"),
        ("/v1/completions", b"[]", 400, "JSON object"),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "`other` does not exist"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be an integer of at"),
        ("/v1/completions", {"prompt": "x", "n": "2"}, 400, "n must be an integer"),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1] * 64}, 400, "maximum context length is 64"),
        ("/v1/completions", {"prompt": [1] * 60, "max_tokens": 5}, 400, "requested 5 output tokens"),
        ("/v1/chat/completions", {"messages": "x"}, 400, "render"),
        ("/tokenize", {"nothing": 1}, 400, "`prompt` must be a string"),
        ("/v1/embeddings", {"input": "x"}, 404, "Not Found"),
    ],
)
async def test_a_request_that_cannot_be_served_gets_an_openai_error(
    session: aiohttp.ClientSession, path: str, body: Any, status: int, says: str
) -> None:
    async with SimEngine(max_model_len=64) as engine:
        error = (await post(session, engine, path, body, status=status))["error"]
        assert says in error["message"]
        assert error["code"] == status
        assert set(error) == {"message", "type", "param", "code"}
        assert engine.model.waiting + engine.model.running == 0


# --- the other endpoints -----------------------------------------------------------------------------------


async def test_tokenize_gives_the_ids_the_engine_uses(session: aiohttp.ClientSession) -> None:
    async with SimEngine(max_model_len=512) as engine:
        chat = [{"role": "user", "content": "Hello there"}]
        tokens = await post(session, engine, "/tokenize", {"model": "tiny", "messages": chat})
        body = {"messages": chat, "max_tokens": 1, "return_token_ids": True}
        answer = await post(session, engine, "/v1/chat/completions", body)
        assert tokens["tokens"] == answer["prompt_token_ids"]
        assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
        text = await post(session, engine, "/tokenize", {"prompt": "Hello there"})
        answer = await complete(session, engine, "Hello there", return_token_ids=True)
        assert text["tokens"] == answer["choices"][0]["prompt_token_ids"]


async def test_what_an_engine_says_about_itself(session: aiohttp.ClientSession) -> None:
    async with SimEngine(served_model_names=("tiny", "alias"), adapters=("sql",), max_model_len=99) as engine:

        async def get(path: str) -> dict[str, Any]:
            async with session.get(f"{engine.base_url}{path}") as reply:
                assert reply.status == 200
                return json.loads(await reply.text() or "{}")

        assert await get("/health") == {}
        models = (await get("/v1/models"))["data"]
        assert [(card["id"], card["parent"]) for card in models] == [
            ("tiny", None),
            ("alias", None),
            ("sql", "tiny"),
        ]
        assert models[0]["max_model_len"] == 99
        assert "simulated" in (await get("/version"))["version"]
        sources = await get("/kv_event_sources")
        assert (sources["0"]["endpoint"], sources["0"]["replay_endpoint"]) == (
            engine.kv_events,
            engine.kv_replay,
        )


async def test_a_reset_forgets_the_cache_unless_it_is_in_use(session: aiohttp.ClientSession) -> None:
    async with SimEngine() as engine:
        prompt = list(range(100, 150))
        await complete(session, engine, prompt)
        assert await post(session, engine, "/reset_prefix_cache", b"") == {"success": True}
        again = await complete(session, engine, prompt)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_metrics_tell_what_happened(session: aiohttp.ClientSession) -> None:
    async with SimEngine(block_size=16, num_gpu_blocks=512, adapters=("sql",)) as engine:
        for _ in range(2):
            await complete(session, engine, list(range(100, 150)), max_tokens=4, ignore_eos=True, model="sql")
        text = await page(session, engine)
    (metrics,) = parse_engine_metrics(text).values()
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (0, 0, 0.0)
    assert (metrics.block_size, metrics.num_gpu_blocks, metrics.model_name) == (16, 512, "tiny")
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (100.0, 48.0)
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (100.0, 8.0)
    for histogram, count in (
        (metrics.ttft, 2),
        (metrics.queue_time, 2),
        (metrics.prefill_time, 2),
        (metrics.inter_token, 6),
    ):
        assert histogram is not None
        assert histogram.count == count
    assert (
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 48.0'
        in text
    )
    assert 'finished_reason="length",model_name="tiny"} 2.0' in text


# --- KV events ---------------------------------------------------------------------------------------------


async def test_kv_events_on_the_wire_mirror_the_cache(session: aiohttp.ClientSession) -> None:
    """Decoded here on its own terms: hashes of the events' tokens against the engine's `cached_tokens`."""
    size = 16
    context = zmq.asyncio.Context()
    async with SimEngine(block_size=size, num_gpu_blocks=24) as engine:
        with context.socket(zmq.SUB) as subscriber:
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            assert engine.kv_events is not None
            subscriber.connect(engine.kv_events)
            async with asyncio.timeout(10):
                while not await subscriber.poll(20):  # until the subscription has taken effect
                    await complete(session, engine, list(range(1, 18)), max_tokens=1)
            while await receive(subscriber) != engine.kv_batches - 1:
                pass
            await post(session, engine, "/reset_prefix_cache", b"")
            counts: Counter[int] = Counter()
            ours: dict[int, int] = {}
            last = engine.kv_batches - 1
            for index in range(25):
                prompt = list(range(100 * (index % 3), 100 * (index % 3) + 40 + 11 * index % 160))
                hashes = chain(array("I", prompt), size, 0, max_blocks=(len(prompt) - 1) // size)
                predicted = next((i for i, one in enumerate(hashes) if not counts[one]), len(hashes)) * size
                answer = await complete(session, engine, prompt, max_tokens=3, ignore_eos=True)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == predicted
                while last < engine.kv_batches - 1:
                    number, events = await receive_events(subscriber)
                    assert number == last + 1
                    last = number
                    for event in events:
                        mirror(event, counts, ours, size)
        assert sum(counts.values()) == sum(engine.model.pool.residents().values())
    context.term()


async def receive(subscriber: zmq.asyncio.Socket) -> int:
    return (await receive_events(subscriber))[0]


async def receive_events(subscriber: zmq.asyncio.Socket) -> tuple[int, list[dict[str, Any]]]:
    topic, sequence, payload = await asyncio.wait_for(subscriber.recv_multipart(), 10)
    _, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, rank) == (b"", 0)
    return int.from_bytes(sequence, "big"), events


def mirror(event: dict[str, Any], counts: "Counter[int]", ours: dict[int, int], size: int) -> None:
    if event["type"] == "AllBlocksCleared":
        counts.clear()
    elif event["type"] == "BlockRemoved":
        counts.subtract(ours[name] for name in event["block_hashes"])
    else:
        parent = event["parent_block_hash"]
        mine = chain(array("I", event["token_ids"]), size, 0 if parent is None else ours[parent])
        ours.update(zip(event["block_hashes"], mine, strict=True))
        counts.update(mine)


async def test_without_kv_events_there_are_no_ports(session: aiohttp.ClientSession) -> None:
    async with SimEngine(kv_events=False) as engine:
        await complete(session, engine, list(range(100)))
        assert (engine.kv_events, engine.kv_replay) == (None, None)


# --- what can go wrong -------------------------------------------------------------------------------------


async def test_an_engine_can_hang_fail_and_recover(session: aiohttp.ClientSession) -> None:
    async with SimEngine() as engine:
        engine.faults.status = 503
        await post(session, engine, "/v1/completions", {"prompt": "x"}, status=503)
        engine.faults.status = None
        engine.faults.hang = True
        hanging = asyncio.ensure_future(complete(session, engine, "x"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(hanging), 0.1)
        engine.kill_connections()
        with pytest.raises(aiohttp.ClientError):
            await hanging
        engine.faults.hang = False
        await complete(session, engine, "x")


async def test_metrics_can_freeze_fail_and_recover(session: aiohttp.ClientSession) -> None:
    async with SimEngine() as engine:
        before = await page(session, engine)
        engine.faults.metrics_frozen = True
        frozen = await page(session, engine)
        await complete(session, engine, "x")
        assert await page(session, engine) == frozen == before
        engine.faults.metrics_frozen = False
        assert await page(session, engine) != before
        engine.faults.metrics_status = 500
        async with session.get(f"{engine.base_url}/metrics") as reply:
            assert reply.status == 500
        engine.faults.health_status = 503
        async with session.get(f"{engine.base_url}/health") as reply:
            assert reply.status == 503


async def test_a_killed_stream_is_reset_and_its_request_gone(session: aiohttp.ClientSession) -> None:
    async with SimEngine(time=SLOW) as engine:
        body = {"prompt": "Hello", "max_tokens": 1000, "ignore_eos": True}
        task = asyncio.ensure_future(stream(session, engine, "/v1/completions", body))
        await until(lambda: engine.model.running == 1)
        engine.kill_connections()
        with pytest.raises(aiohttp.ClientError):
            await task
        await until(lambda: engine.model.running == 0)


async def test_a_restarted_engine_has_its_ports_back_and_nothing_cached(
    session: aiohttp.ClientSession,
) -> None:
    async with SimEngine() as engine:
        where = (engine.endpoint, engine.kv_events, engine.kv_replay)
        await complete(session, engine, list(range(100)))
        await engine.kill()
        with pytest.raises(aiohttp.ClientError):
            await complete(session, engine, list(range(100)))
        await engine.restart()
        assert (engine.endpoint, engine.kv_events, engine.kv_replay) == where
        answer = await complete(session, engine, list(range(100)))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_paused_engine_goes_on_where_it_stopped(session: aiohttp.ClientSession) -> None:
    async with SimEngine() as engine:
        engine.pause()
        task = asyncio.ensure_future(complete(session, engine, "x", max_tokens=5, ignore_eos=True))
        await until(lambda: engine.model.waiting == 1)
        assert not task.done()
        engine.resume()
        assert (await task)["usage"]["completion_tokens"] == 5


async def test_a_port_that_is_taken_is_a_clear_error() -> None:
    async with SimEngine() as engine:
        with pytest.raises(WarmrouteError, match="cannot listen on"):
            async with SimEngine(port=engine.server.port):
                pass


async def test_its_rank_is_in_metrics_events_and_sources():
    async with SimEngine(dp_rank=3) as engine, aiohttp.ClientSession(engine.base_url) as client:
        async with client.get("/kv_event_sources") as reply:
            assert set(await reply.json()) == {"3"}
        async with client.get("/metrics") as reply:
            page = await reply.text()
        assert set(parse_engine_metrics(page)) == {3}
