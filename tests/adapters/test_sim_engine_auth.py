import dataclasses

import aiohttp
import pytest

from tests.support.sim_engine import SimEngine


async def status(engine, path, method="GET", **headers):
    async with (
        aiohttp.ClientSession(engine.base_url) as client,
        client.request(method, path, json={"model": "tiny", "prompt": "x"}, headers=headers) as reply,
    ):
        if reply.status == 401:
            assert await reply.json() == {"error": "Unauthorized"}
        return reply.status


async def test_some_paths_ask_for_a_key_as_vllms_do():
    async with SimEngine(api_keys=("one", "two")) as engine:
        for path, method in (("/v1/models", "GET"), ("/v1/completions", "POST")):
            assert await status(engine, path, method) == 401
            for wrong in ("Bearer three", "Bearer", "one", "Basic one", "Bearer ü"):
                assert await status(engine, path, method, Authorization=wrong) == 401
            for right in ("Bearer one", "bearer two"):
                assert await status(engine, path, method, Authorization=right) == 200
        assert await status(engine, "/v2/nothing") == 401
        assert await status(engine, "/inference/nothing") == 401
        assert await status(engine, "/cohere/nothing") == 401
        assert await status(engine, "/v1/models", "OPTIONS") == 405


@pytest.mark.parametrize("path", ["/metrics", "/health", "/version"])
async def test_the_others_ask_for_none(path):
    async with SimEngine(api_keys=("one",)) as engine:
        assert await status(engine, path) == 200
        assert await status(engine, "/tokenize", "POST") == 200


async def test_an_engine_started_without_keys_asks_for_none_and_may_come_back_with_one():
    async with SimEngine() as engine:
        assert await status(engine, "/v1/models") == 200
        engine.server.settings = dataclasses.replace(engine.server.settings, api_keys=("one",))
        await engine.restart()
        assert await status(engine, "/v1/models") == 401
