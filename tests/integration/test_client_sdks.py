"""Clients that people use, unchanged, to real vLLM: the SDKs of OpenAI and Anthropic, and LiteLLM."""

import asyncio
import gc
import json
import random
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from extproc.demo.workload import prose
from tests.support.full_stack import FullStack, Worker
from tests.support.vllm import ReplicaSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.envoy,
    pytest.mark.timeout(300),
    # The packages' own deprecations are not ours.
    pytest.mark.filterwarnings("default"),
]

TOOLS = ReplicaSpec(extra_args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA}
MAX_MODEL_LEN = TOOLS.max_model_len


@pytest.fixture(scope="module")
def replicas(vllm_pool):
    return vllm_pool.start(TOOLS, replace(TOOLS))


@asynccontextmanager
async def stack_of(replicas, tmp_path):
    workers = [Worker(r.endpoint, r.kv_events, r.kv_replay) for r in replicas]
    async with FullStack(tmp_path, workers) as stack:
        await stack.until_subscribed(len(workers))
        yield stack


class Decisions:
    """The router's log, read as the requests end."""

    def __init__(self, stack):
        self._stack = stack
        self._seen = 0

    async def next(self):
        await self._stack.until(lambda: len(self._stack.log_entries()) > self._seen)
        entry = list(self._stack.log_entries().values())[self._seen]
        self._seen += 1
        return entry


def document(seed, words=700):
    return prose(random.Random(seed), words)


async def same_worker_and_warm(decisions, asks):
    """Ask one after the other: all go where the first went, and find its prefix."""
    first = None
    for ask in asks:
        await ask()
        entry = await decisions.next()
        assert entry["outcome"] == "finished"
        if first is None:
            first = entry
            continue
        assert entry["selected_worker"] == first["selected_worker"]
        assert entry["predicted_cached_tokens"] > 500
        # What the engine counts is known where the client's API says it.
        assert entry["actual_cached_tokens"] in (None, entry["predicted_cached_tokens"])
    return first


async def test_openai(replicas, tmp_path):
    import openai

    async with stack_of(replicas, tmp_path) as stack:
        decisions = Decisions(stack)
        async with openai.AsyncOpenAI(
            base_url=f"{stack.envoy.url}/v1", api_key="none", max_retries=0
        ) as client:

            def messages(text, question):
                return [{"role": "system", "content": text}, {"role": "user", "content": question}]

            async def plain(text, question="Why?"):
                reply = await client.chat.completions.create(
                    model="tiny", messages=messages(text, question), max_tokens=8, temperature=0
                )
                assert reply.choices[0].message.content
                assert reply.usage.completion_tokens == 8

            async def streamed(text):
                pieces, usage = [], None
                stream = await client.chat.completions.create(
                    model="tiny", messages=messages(text, "And then?"), max_tokens=8, temperature=0,
                    stream=True, stream_options={"include_usage": True},
                )  # fmt: skip
                async for chunk in stream:
                    pieces += [choice.delta.content for choice in chunk.choices]
                    usage = chunk.usage or usage
                assert any(pieces)
                assert usage.prompt_tokens_details.cached_tokens > 500

            async def completion(text):
                reply = await client.completions.create(
                    model="tiny", prompt=text, max_tokens=4, temperature=0
                )
                assert reply.choices[0].text is not None

            async def response(text):
                reply = await client.responses.create(
                    model="tiny", instructions=text, input="Who?", max_output_tokens=8, temperature=0
                )
                assert reply.usage.output_tokens == 8

            for seed in (1, 2):
                text = document(seed)
                asks = [
                    lambda t=text: plain(t),
                    lambda t=text: streamed(t),
                    lambda t=text: plain(t, "Where?"),
                ]
                await same_worker_and_warm(decisions, [*asks, lambda t=text: response(t)])
            text = document(3)
            await same_worker_and_warm(decisions, [lambda: completion(text)] * 3)

            # Tools: a call that must be made, and its result handed back.
            tools = [{"type": "function", "function": WEATHER}]
            named = {"type": "function", "function": {"name": "get_weather"}}
            question = [{"role": "user", "content": "The weather in Paris?"}]
            reply = await client.chat.completions.create(
                model="tiny", messages=question, tools=tools, tool_choice=named, max_tokens=64, temperature=0
            )
            (call,) = reply.choices[0].message.tool_calls
            assert call.function.name == "get_weather"
            json.loads(call.function.arguments)
            first = await decisions.next()
            history = [
                *question,
                reply.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "Sunny."},
            ]
            reply = await client.chat.completions.create(
                model="tiny", messages=history, tools=tools, tool_choice="none", max_tokens=8, temperature=0
            )
            assert reply.choices[0].finish_reason in ("length", "stop")
            second = await decisions.next()
            assert second["selected_worker"] == first["selected_worker"]

            # Errors of the engine and of ours arrive as what they are.
            with pytest.raises(openai.NotFoundError) as not_found:
                await client.chat.completions.create(model="nobody", messages=question)
            assert "nobody" in not_found.value.message
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(
                    model="tiny", messages=question, max_tokens=MAX_MODEL_LEN + 1
                )
            with pytest.raises(openai.BadRequestError):
                await client.post("/chat/completions", cast_to=object, body=None)
            listed = [model.id async for model in client.models.list()]
            assert listed == ["tiny"]

            # A client that leaves: the engine stops working, and nothing stays booked.
            stream = await client.chat.completions.create(
                model="tiny", messages=question, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
            await stack.until_idle()
            outcomes = [entry["outcome"] for entry in stack.log_entries().values()]
            assert "cancelled" in outcomes


async def test_a_long_prompt(replicas, tmp_path):
    import openai

    async with stack_of(replicas, tmp_path) as stack:
        decisions = Decisions(stack)
        async with openai.AsyncOpenAI(
            base_url=f"{stack.envoy.url}/v1", api_key="none", max_retries=0
        ) as client:
            text = document(4, words=8000)  # more than a MiB would be refused by a proxy not told otherwise

            async def ask(question):
                content = [{"type": "text", "text": text}, {"type": "text", "text": question}]
                reply = await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": content}], max_tokens=4, temperature=0
                )
                assert reply.usage.prompt_tokens > 8000

            await same_worker_and_warm(decisions, [lambda: ask("One?"), lambda: ask("Two?")])
            too_long = "word " * 400_000  # about 2 MB
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": too_long}]
                )
            assert "context" in refused.value.message or "maximum" in refused.value.message


async def test_anthropic(replicas, tmp_path):
    import anthropic

    async with stack_of(replicas, tmp_path) as stack:
        decisions = Decisions(stack)
        async with anthropic.AsyncAnthropic(
            base_url=stack.envoy.url, api_key="none", max_retries=0
        ) as client:

            async def plain(text, question="Why?"):
                reply = await client.messages.create(
                    model="tiny", system=text, messages=[{"role": "user", "content": question}], max_tokens=8
                )
                assert reply.usage.output_tokens == 8
                assert reply.content[0].type == "text"

            async def streamed(text):
                question = [{"role": "user", "content": "And then?"}]
                async with client.messages.stream(
                    model="tiny", system=text, messages=question, max_tokens=8
                ) as stream:
                    text = "".join([piece async for piece in stream.text_stream])
                    final = await stream.get_final_message()
                assert text == final.content[0].text
                assert final.usage.output_tokens == 8

            for seed in (11, 12):
                text = document(seed)
                await same_worker_and_warm(
                    decisions,
                    [lambda t=text: plain(t), lambda t=text: streamed(t), lambda t=text: plain(t, "Where?")],
                )

            tools = [
                {
                    "name": WEATHER["name"],
                    "description": WEATHER["description"],
                    "input_schema": SCHEMA,
                }
            ]
            question = [{"role": "user", "content": "The weather in Paris?"}]
            # A call that was made, and its result handed back.
            call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny."}
            history = [
                *question,
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
            for _ in range(2):
                reply = await client.messages.create(
                    model="tiny", messages=history, tools=tools, max_tokens=8
                )
                assert reply.usage.output_tokens > 0
                entry = await decisions.next()
            assert entry["predicted_cached_tokens"] == entry["actual_cached_tokens"] > 0

            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="nobody", messages=question, max_tokens=8)
            with pytest.raises(anthropic.BadRequestError):
                await client.post("/v1/messages", cast_to=object, body=None)

            async with client.messages.stream(model="tiny", messages=question, max_tokens=4000) as stream:
                async for _ in stream.text_stream:
                    break
            await stack.until_idle()


async def test_litellm(replicas, tmp_path, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # the package comes with one
    import litellm

    litellm.telemetry = False
    async with stack_of(replicas, tmp_path) as stack:
        decisions = Decisions(stack)
        options = {"api_key": "none", "num_retries": 0, "temperature": 0, "max_tokens": 8}

        async def openai_like(text, question="Why?", **more):
            return await litellm.acompletion(
                model="hosted_vllm/tiny", api_base=f"{stack.envoy.url}/v1", **options, **more,
                messages=[{"role": "system", "content": text}, {"role": "user", "content": question}],
            )  # fmt: skip

        async def plain(text, question="Why?"):
            reply = await openai_like(text, question)
            assert reply.usage.completion_tokens == 8

        async def streamed(text):
            stream = await openai_like(text, stream=True, stream_options={"include_usage": True})
            assert any([chunk.choices and chunk.choices[0].delta.content async for chunk in stream])

        text = document(21)
        await same_worker_and_warm(
            decisions, [lambda: plain(text), lambda: streamed(text), lambda: plain(text, "Where?")]
        )
        tools = [{"type": "function", "function": WEATHER}]
        named = {"type": "function", "function": {"name": "get_weather"}}
        reply = await litellm.acompletion(
            model="hosted_vllm/tiny", api_base=f"{stack.envoy.url}/v1", **{**options, "max_tokens": 64},
            messages=[{"role": "user", "content": "The weather in Paris?"}], tools=tools, tool_choice=named,
        )  # fmt: skip
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        await decisions.next()
        with pytest.raises(litellm.NotFoundError):
            await litellm.acompletion(
                model="hosted_vllm/nobody", api_base=f"{stack.envoy.url}/v1", **options,
                messages=[{"role": "user", "content": "Anybody?"}],
            )  # fmt: skip
        await decisions.next()
        # Cancelled while it streams.
        stream = await openai_like("Go on.", stream=True, extra_body={"ignore_eos": True, "max_tokens": 4000})
        await anext(aiter(stream))
        await stream.aclose()
        await asyncio.wait_for(stack.until_idle(), 60)
        # It keeps its sessions; left to the garbage collector, they would warn in somebody else's test.
        await litellm.close_litellm_async_clients()
        del stream, reply
        gc.collect()
