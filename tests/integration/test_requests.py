"""Every kind of request through the whole product: real Envoy, `warmroute serve`, simulated engines."""

import asyncio
import contextlib
import gzip
import json
import random
import uuid

import pytest
import pytest_asyncio

from extproc.demo.workload import prose
from tests.support.full_stack import FullStack, Worker
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 16
BODY_LIMIT = 24 << 20
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            # Keys that are not sorted: whoever re-serialises them loses every hit.
            "parameters": {"type": "object", "required": ["city"], "properties": {"z": {}, "city": {}}},
        },
    }
]


class Setup:
    def __init__(self, stack, engines):
        self.stack, self.engines = stack, engines
        self.rng = random.Random(5)

    def text(self, words=150):
        return prose(self.rng, words)

    def served(self):
        """Requests every engine has taken, by its own count."""
        return sum(engine.model.stats.prompt_tokens for engine in self.engines)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setup(tmp_path_factory):
    async with SimEngine() as one, SimEngine() as two:
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in (one, two)]
        settings = {
            "limits": {"prompt_budget_ms": 5_000, "body_bytes": BODY_LIMIT},
            "cost": {"max_prefix_share": 1.0},  # asked again and again, a prefix would get a second worker
        }
        async with FullStack(tmp_path_factory.mktemp("stack"), workers, settings=settings) as stack:
            await stack.until_subscribed(2)
            yield Setup(stack, [one, two])


def usage_of(reply):
    """(prompt tokens, cached tokens) as the client was told, in any API's spelling."""
    usage = reply.usage
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage.get("cache_read_input_tokens") or 0
    return usage["input_tokens"] + cached, cached


async def answered(setup, reply):
    """The log line of a request that was answered, once its lease is gone."""
    assert reply.status == 200, reply.body
    entry = await setup.stack.decision(reply.request_id)
    assert entry["outcome"] == "finished"
    return entry


async def until_warm(setup, send):
    """(first, warm): log lines of equal requests. Never is more predicted than there is, and soon just that.

    On a busy machine a request may be faster than the events about the one before it.
    """
    first = entry = await answered(setup, await send())
    assert first["predicted_cached_tokens"] <= first["actual_cached_tokens"]
    for _ in range(20):
        reply = await send()
        entry = await answered(setup, reply)
        if reply.usage is not None:
            assert (entry["prompt_tokens"], entry["actual_cached_tokens"]) == usage_of(reply)
        assert entry["predicted_cached_tokens"] <= entry["actual_cached_tokens"]
        if entry["predicted_cached_tokens"] == entry["actual_cached_tokens"] > 0:
            return first, entry
    raise AssertionError(f"never predicted: {entry}")


async def sent_twice(setup, path, body):
    """The second of two equal requests is warm, and predicted exactly. Returns both log lines."""
    first, second = await until_warm(setup, lambda: setup.stack.post(path, body))
    assert first["predicted_cached_tokens"] == first["actual_cached_tokens"]
    return first, second


async def load_only(setup, reply, why):
    entry = await setup.stack.decision(reply.request_id)
    assert (entry["decision"], entry["load_only"]) == ("load-only", why)
    assert entry["predicted_cached_tokens"] is None
    return entry


# --- what is understood --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_every_api_is_predicted_exactly(setup, path, stream):
    text = setup.text()
    body = {"model": "tiny"} | {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
        "/v1/completions": {"prompt": text, "max_tokens": 4},
        "/v1/responses": {"input": text, "max_output_tokens": 4},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
    }[path]
    if stream:
        body["stream"] = True
        if path in ("/v1/chat/completions", "/v1/completions"):
            body["stream_options"] = {"include_usage": True}
    first, second = await until_warm(setup, lambda: setup.stack.post(path, body))
    assert first["actual_cached_tokens"] == first["predicted_cached_tokens"]
    assert second["prompt_tokens"] == first["prompt_tokens"] > BLOCK
    if stream:
        assert second["ttft_ms"] > 0


async def test_a_system_prompt_counts_for_anthropics_messages(setup):
    body = {
        "model": "tiny",
        "system": setup.text(),
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Well?"}]}],
        "max_tokens": 4,
    }
    await sent_twice(setup, "/v1/messages", body)


async def test_pitfall_21_all_four_prompt_shapes(setup):
    ids = [[setup.rng.randint(300, 2000) for _ in range(100)] for _ in range(3)]
    for prompt in (setup.text(), ids[0]):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
        _, second = await sent_twice(setup, "/v1/completions", body)
        assert second["decision"] in ("warm-exact", "warm-partial")
    for prompt in ([setup.text(), setup.text()], ids[1:]):
        for _ in range(20):
            reply = await setup.stack.complete(prompt)
            entry = await answered(setup, reply)
            assert entry["prompt_tokens"] == reply.usage["prompt_tokens"]
            # The engine tells of the last prompt only, the prediction is for all of them.
            if entry["predicted_cached_tokens"] > entry["actual_cached_tokens"] > 0:
                break
        else:
            pytest.fail(f"never predicted: {entry}")


async def test_several_choices_of_one_prompt(setup):
    reply = await setup.stack.chat(setup.text(), n=3)
    assert len(json.loads(reply.body)["choices"]) == 3
    entry = await setup.stack.decision(reply.request_id)
    # Its cached tokens count every sequence; the prediction is about one. They must not be compared.
    assert (entry["outcome"], entry["load_only"]) == ("finished", None)
    assert entry["prompt_tokens"] == reply.usage["prompt_tokens"]


async def test_pitfall_28_turns_of_a_chat_and_tool_calls_go_where_the_chat_is_warm(setup):
    messages = [{"role": "system", "content": setup.text()}, {"role": "user", "content": "What weather?"}]
    first, warm = await until_warm(setup, lambda: setup.stack.chat(messages, tools=TOOLS))
    messages += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Köln", "a": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    second = await setup.stack.chat(messages, tools=TOOLS, stream=True)
    turns = [warm, await answered(setup, second)]
    messages += [{"role": "assistant", "content": second.text}, {"role": "user", "content": "Thanks."}]
    _, third = await until_warm(setup, lambda: setup.stack.chat(messages, tools=TOOLS))
    turns.append(third)
    assert turns[1]["predicted_cached_tokens"] == turns[1]["actual_cached_tokens"]
    cached = [entry["actual_cached_tokens"] for entry in turns]
    assert first["actual_cached_tokens"] < cached[0] <= cached[1] < cached[2], turns


async def test_pitfall_29_parts_and_plain_text_are_the_same_prompt(setup):
    text = setup.text()
    _, plain = await until_warm(setup, lambda: setup.stack.chat(text))
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    entry = await answered(setup, await setup.stack.chat(parts))
    assert (entry["prefix_key"], entry["selected_worker"]) == (plain["prefix_key"], plain["selected_worker"])
    assert entry["predicted_cached_tokens"] == entry["actual_cached_tokens"] > 0


async def test_pitfall_37_salts_share_nothing(setup):
    text = setup.text()
    keys = set()
    for fields in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        first, _ = await until_warm(setup, lambda fields=fields: setup.stack.chat(text, **fields))
        assert first["actual_cached_tokens"] == 0
        keys.add(first["prefix_key"])
    assert len(keys) == 3


async def test_pitfall_34_a_gzip_body_is_read_and_forwarded_as_it_is(setup):
    body = {"model": "tiny", "prompt": setup.text(), "max_tokens": 2}
    _, plain = await sent_twice(setup, "/v1/completions", body)
    packed = gzip.compress(json.dumps(body).encode())
    reply = await setup.stack.post("/v1/completions", packed, {"content-encoding": "gzip"})
    entry = await setup.stack.decision(reply.request_id)
    assert entry["selected_worker"] == plain["selected_worker"]
    assert entry["predicted_cached_tokens"] > 0
    # It arrived as it was sent: engines do not read gzip, and say so themselves.
    assert (reply.status, entry["status"]) == (400, 400)
    assert b"content-encoding" in reply.body


# --- what is not: by load -------------------------------------------------------------------------------


async def test_a_content_encoding_we_do_not_read_goes_by_load(setup):
    reply = await setup.stack.post("/v1/completions", b"\x28\xb5\x2f\xfd", {"content-encoding": "zstd"})
    await load_only(setup, reply, "content-encoding")


async def test_the_models_page_goes_by_load(setup):
    request_id = str(uuid.uuid4())
    async with setup.stack.session.get("/v1/models", headers={"x-request-id": request_id}) as reply:
        assert reply.status == 200
        assert [model["id"] for model in (await reply.json())["data"]] == ["tiny"]
    entry = await setup.stack.decision(request_id)
    assert (entry["load_only"], entry["outcome"], entry["status"]) == ("method", "finished", 200)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/unknown", "/v1/messages/count_tokens"])
async def test_pitfall_26_other_paths_go_by_load_with_the_engines_own_answer(setup, path):
    reply = await setup.stack.post(path, {"model": "tiny", "input": "hello"})
    assert reply.status == 404  # the simulated engine has none of them
    entry = await load_only(setup, reply, "path")
    assert (entry["outcome"], entry["status"]) == ("finished", 404)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/unknown"])
async def test_a_post_without_a_body_goes_by_load_at_once(setup, path):
    reply = await setup.stack.post(path, b"")
    assert reply.status in (400, 404)  # in the engine's words
    entry = await setup.stack.decision(reply.request_id)
    assert entry["decision"] == "load-only"
    assert entry["served_by"] in [engine.endpoint for engine in setup.engines]


async def test_images_go_by_load(setup):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    reply = await setup.stack.chat([{"role": "user", "content": [image]}])
    entry = await setup.stack.decision(reply.request_id)
    assert entry["decision"] == "load-only"


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b'{"model":', b"[1, 2]", b'"text"', b"\xff\xfe", b'{"prompt": "x"} }'])
async def test_pitfall_24_malformed_json_is_a_clean_400_without_an_echo(setup, body):
    served = setup.served()
    reply = await setup.stack.post("/v1/completions", body)
    assert reply.status == 400
    error = json.loads(reply.body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")
    assert len(reply.body) < 300
    assert body not in reply.body
    assert setup.served() == served


async def test_pitfall_13_twenty_megabytes_are_served_and_over_the_limit_is_a_clean_413(setup):
    messages = [{"role": "user", "content": "Hello there, how are you?"}]

    def body(size):
        ask = {"model": "tiny", "messages": messages, "max_tokens": 2, "metadata": {"pad": ""}}
        ask["metadata"]["pad"] = "x" * (size - len(json.dumps(ask)))
        return json.dumps(ask).encode()

    for size in (20_000_000, BODY_LIMIT):
        reply = await setup.stack.post("/v1/chat/completions", body(size))
        assert reply.status == 200, reply.body[:300]
        entry = await setup.stack.decision(reply.request_id)
        assert (entry["load_only"], entry["outcome"]) == ("body-too-long", "finished")
    for size in (BODY_LIMIT + 1, BODY_LIMIT + 900_000):
        reply = await setup.stack.post("/v1/chat/completions", body(size))
        assert reply.status == 413
        error = json.loads(reply.body)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
    # Far over it Envoy's own limit answers, before we see any of it.
    with contextlib.suppress(ConnectionError):
        reply = await setup.stack.post("/v1/chat/completions", body(BODY_LIMIT + (4 << 20)))
        assert reply.status == 413
    assert (await setup.stack.chat("Still there?")).status == 200


# --- clients --------------------------------------------------------------------------------------------


async def test_the_destination_is_not_the_clients_to_choose(setup):
    text = setup.text()
    _, warm = await until_warm(setup, lambda: setup.stack.chat(text))
    other = next(e.endpoint for e in setup.engines if e.endpoint != warm["selected_worker"])
    forged = {
        "x-gateway-destination-endpoint": other,
        "test-epp-endpoint-selection": other,
        "x-warmroute-ticket": "forged",
    }
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    entry = await setup.stack.decision(
        (await setup.stack.post("/v1/chat/completions", body, forged)).request_id
    )
    assert entry["selected_worker"] == entry["served_by"] == warm["selected_worker"]


@pytest.mark.parametrize("moment", ["before the first token", "while tokens come"])
async def test_a_client_that_leaves_is_a_cancellation_at_both_ends(setup, moment):
    waiting = moment == "before the first token"
    request_id = str(uuid.uuid4())
    body = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 5_000, "stream": True, "ignore_eos": True}
    for engine in setup.engines:
        engine.pause()
    post = setup.stack.session.post("/v1/completions", json=body, headers={"x-request-id": request_id})
    ask = asyncio.create_task(post.__aenter__())
    await until(lambda: sum(e.model.running + e.model.waiting for e in setup.engines) == 1)
    try:
        if waiting:
            ask.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await ask).close()
        else:
            for engine in setup.engines:
                engine.resume()
            reply = await ask
            await reply.content.readany()
            reply.close()
        entry = await setup.stack.decision(request_id)
        assert entry["outcome"] == "cancelled"
    finally:
        for engine in setup.engines:
            engine.resume()
    await until(lambda: not any(e.model.running or e.model.waiting for e in setup.engines))
    # No lease of it is left: the next request sees nobody there.
    after = await setup.stack.decision((await setup.stack.chat("Next.")).request_id)
    assert [candidate["active"] for candidate in after["candidate_workers"]] == [0, 0]
