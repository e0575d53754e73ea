"""Clients that leave while our answer is on its way to a real Envoy: no request ends as lost."""

import asyncio
import json
import random
import uuid
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.support.full_stack import FullStack, Worker
from tests.support.ports import free_port
from tests.support.sim_engine import SimEngine
from tests.support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.envoy


class Stack(FullStack):
    """The whole product; `wire` is between Envoy and the router."""

    def __init__(self, directory, engine):
        self.admin = f"127.0.0.1:{free_port()}"
        workers = [Worker(engine.endpoint, engine.kv_events, engine.kv_replay)]
        super().__init__(directory, workers, settings={"admin": {"listen": self.admin}})
        self.wire = TcpProxy(self.settings["listen"])
        self.settings["envoy"] = {"message_timeout_s": 30, "router": [self.wire.endpoint]}

    async def open_requests(self):
        async with self.session.get(f"http://{self.admin}/state") as reply:
            return (await reply.json())["open_requests"]

    async def until_open(self, count):
        async with asyncio.timeout(30):
            while await self.open_requests() != count:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.02)

    def outcomes(self):
        """Of all requests, those too whose ids somebody else has used."""
        *lines, _unfinished = self.decisions.read_text().split("\n")
        return [json.loads(line)["outcome"] for line in lines]


@asynccontextmanager
async def stack(tmp_path):
    async with SimEngine() as engine:
        built = Stack(tmp_path, engine)
        async with built.wire, built:
            yield built


async def test_a_client_that_leaves_before_envoy_has_our_answer(tmp_path):
    async with stack(tmp_path) as net:
        await net.chat("Is everything connected?")
        net.wire.mute()
        # Without a body there is one answer of ours, the decision; it is not taken.
        asked = [asyncio.create_task(net.session.get("/v1/models")) for _ in range(8)]
        await net.until_open(8)
        for one in asked:
            one.cancel()
        await net.until_open(0)
        net.wire.flow()
        await net.until(lambda: len(net.outcomes()) == 9)
        assert sorted(net.outcomes()) == ["cancelled"] * 8 + ["finished"]


async def test_clients_that_leave_at_any_moment(tmp_path):
    rng = random.Random(5)

    async def leave(net, places):
        async with places:
            patience = aiohttp.ClientTimeout(rng.uniform(0.0, 0.03))
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"{rng.random()}"}]}
            headers = {"x-request-id": str(uuid.uuid4())}
            try:
                async with net.session.post(
                    "/v1/chat/completions", json=body, headers=headers, timeout=patience
                ) as reply:
                    await reply.read()
            except (TimeoutError, aiohttp.ClientError):
                pass

    async with stack(tmp_path) as net:
        await net.chat("Is everything connected?")
        places = asyncio.Semaphore(10)
        await asyncio.gather(*(leave(net, places) for _ in range(400)))
        await net.until_idle()
        await net.until_open(0)
        outcomes = set(net.outcomes())
        assert "cancelled" in outcomes
        assert "lost" not in outcomes
