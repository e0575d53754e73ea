"""Real vLLM replicas are killed and paused under load, and the router in front of them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Self

import pytest
import pytest_asyncio

from tests.chaos.stack import ENGINES, ChaosStack
from tests.integration.conftest import vllm_pool  # noqa: F401 - a fixture
from tests.support.vllm import Replica, ReplicaSpec, VllmPool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(600),
]


class VllmProcess:
    """A replica with the interface of `EngineProcess`."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.endpoint = replica.endpoint
        self.kv_events, self.kv_replay = replica.kv_events, replica.kv_replay

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._replica.kill()

    async def kill(self) -> None:
        await asyncio.to_thread(self._replica.kill)

    async def start(self) -> None:
        await asyncio.to_thread(self._replica.restart)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._replica.pid is not None
        os.kill(self._replica.pid, number)


@pytest_asyncio.fixture(loop_scope="package")
async def stack(vllm_pool: VllmPool, tmp_path) -> AsyncIterator[ChaosStack]:  # noqa: F811
    replicas = vllm_pool.start(*[ReplicaSpec(num_gpu_blocks_override=160)] * ENGINES)
    async with ChaosStack(tmp_path, engines=[VllmProcess(replica) for replica in replicas]) as stack:
        await stack.begin()
        yield stack


async def test_engines_and_router_are_killed_and_paused(stack):
    victim, paused, _ = stack.engines
    async with stack.load() as load:
        await load.more(20)
        await stack.kill_engine(victim)
        await load.more(20)
        await victim.start()
        await stack.until_ready()
        await load.more(20)
        paused.pause()
        try:
            await stack.until_ready(2)
            async with stack.load(seed=1) as later:
                await later.more(20)
        finally:
            paused.resume()
        await stack.until_ready()
        await stack.router.kill()
        await load.more(20)
        await stack.start_router()
        await stack.until_routing()
        await load.more(20)
    load.sent += later.sent
    await stack.expect_unharmed(load)
