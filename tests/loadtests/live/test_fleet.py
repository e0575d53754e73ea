import asyncio
import json

import pytest

from extproc.demo import vllm_command
from extproc.protocol.engine_metrics import parse_engine_metrics
from extproc.sim.time_model import PRESETS
from loadtests.live.fleet import Engine, Fleet, FleetError, refused, scratch, trivial_answers, vllm_shown
from loadtests.live.http1 import Pool, post_json
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until


def fleet_of(*engines):
    return Fleet("simulated", tuple(Engine(e.endpoint, e.kv_events, e.kv_replay, "") for e in engines), 16)


async def cached(engine, prompt):
    async with Pool(engine.endpoint) as pool:
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1}).encode()
        answer = json.loads((await post_json(pool, "/v1/completions", body)).body)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_reset_empties_every_engine_and_lets_the_events_say_so():
    prompt = list(range(300, 400))
    async with SimEngine() as a, SimEngine() as b:
        for engine in (a, b):
            await cached(engine, prompt)
            assert await cached(engine, prompt) == 96
        before = [engine.kv_batches for engine in (a, b)]
        await fleet_of(a, b).reset()
        # What says "cleared" has been published, not only decided.
        assert all(engine.kv_batches > count for engine, count in zip((a, b), before, strict=True))
        assert [await cached(engine, prompt) for engine in (a, b)] == [0, 0]


async def test_reset_waits_for_an_engine_that_is_busy():
    slow = PRESETS["medium"]
    async with SimEngine(time=slow) as engine:
        async with Pool(engine.endpoint) as pool:
            body = json.dumps({"model": "tiny", "prompt": [5] * 300, "max_tokens": 20, "ignore_eos": True})
            asking = asyncio.create_task(post_json(pool, "/v1/completions", body.encode()))
            await until(lambda: engine.model.running)
            await fleet_of(engine).reset()
            assert (await asking).status == 200
        assert await cached(engine, [5] * 300) == 0


async def test_an_engine_without_that_endpoint_says_what_to_set():
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(FleetError, match="VLLM_SERVER_DEV_MODE"):
            await Fleet("vLLM", (Engine(endpoint, None, None, ""),), 16).reset()


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b'{"success": false}', True), (b'{"success": true}', False), (b"", False), (b"null", False)],
)
def test_refusals(body, expected):
    assert refused(body) is expected


def test_the_trivial_engine_looks_like_an_engine():
    made = trivial_answers()
    assert json.loads(made[""])["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert json.loads(made["/v1/models"])["data"][0]["id"] == "tiny"
    (metrics,) = parse_engine_metrics(made["/metrics"]).values()
    assert (metrics.running, metrics.waiting, metrics.block_size) == (0, 0, 16)


def test_a_vllm_command_is_shown_as_one_would_type_it(tmp_path):
    command, _ = vllm_command.build("/some/python", tmp_path, 100)
    shown = vllm_shown(command)
    assert shown.startswith("vllm serve MODEL --served-model-name tiny")
    assert '\'{"enable_kv_cache_events": true' in shown


def test_scratch_folders_are_new(tmp_path):
    first, second = scratch(tmp_path, "x"), scratch(tmp_path, "x")
    assert first != second
    assert first.is_dir()
    assert second.is_dir()
