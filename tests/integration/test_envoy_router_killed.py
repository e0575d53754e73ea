"""The router as a process of its own, killed without a word while answers stream."""

import asyncio
import gzip
import re
import sys
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc.adapters.child_process import ChildProcess
from extproc.adapters.envoy_bootstrap import EnvoySettings, StaticWorkers
from tests.support.http import Upstream
from tests.support.mesh import CHAT
from tests.support.ports import free_port
from tests.support.waiting import until, until_told

pytestmark = pytest.mark.envoy

METRICS = gzip.decompress((Path(__file__).parents[1] / "data/vllm/metrics_0.32.txt.gz").read_bytes())
STREAMS = 50


class Engine:
    """Streams until told to finish; has a metrics page."""

    def __init__(self):
        self.open, self.finish = 0, asyncio.Event()

    async def respond(self, request, received):
        if request.path.startswith("/metrics"):
            return web.Response(body=METRICS)
        if request.path != CHAT:
            return web.json_response({"object": "list", "data": []})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.open += 1
        while not self.finish.is_set():
            await response.write(b'data: {"choices": []}\n\n')
            await asyncio.sleep(0.02)
        await response.write(b"data: [DONE]\n\n")
        return response


async def test_streams_survive_requests_are_served_and_the_router_comes_back(start_envoy, tmp_path):
    engine, port = Engine(), free_port()
    decisions = tmp_path / "decisions.jsonl"
    async with Upstream(engine.respond) as one, Upstream(engine.respond) as two:
        endpoints = [one.endpoint, two.endpoint]
        config = tmp_path / "warmroute.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "listen": f"127.0.0.1:{port}",
                    "decision_log": {"path": str(decisions)},
                    "pools": [{"discovery": {"static": endpoints}, "kv_events": {"enabled": False}}],
                }
            )
        )
        command = [sys.executable, "-m", "extproc", "serve", "-c", str(config)]

        async def start_router(number):
            child = ChildProcess(command, tmp_path / f"router-{number}.log")
            await child.start()
            await until(
                lambda: not child.running or re.search("listening on", child.log_tail()),
                60,
                "the router serves",
            )
            assert child.running, child.log_tail()
            return child

        router = await start_router(1)
        envoy = await start_envoy(
            EnvoySettings(workers=StaticWorkers(tuple(endpoints)), routers=(f"127.0.0.1:{port}",))
        )
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(connector=connector) as client:

                async def ask():
                    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
                    async with client.post(envoy.url + CHAT, json=body) as reply:
                        return reply.status, await reply.read()

                streams = [asyncio.create_task(ask()) for _ in range(STREAMS)]
                await until(lambda: engine.open == STREAMS, 30)
                await router.kill()
                streams.append(asyncio.create_task(ask()))
                await until(lambda: engine.open == STREAMS + 1, 30)
                engine.finish.set()
                for status, body in await asyncio.gather(*streams):
                    assert status == 200
                    assert body.endswith(b"data: [DONE]\n\n")

                before = decisions.stat().st_size if decisions.exists() else 0
                router = await start_router(2)

                async def served_by_router():
                    status, _ = await ask()
                    assert status == 200
                    return decisions.exists() and decisions.stat().st_size > before

                await until_told(served_by_router, bool)
        finally:
            await router.stop()
