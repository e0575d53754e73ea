"""What `/metrics` says of requests while they come, by a real vLLM and by the simulated engine.

Both tell what the last step left: a request that came since is in no count, and one that is counted as
waiting has really found no place.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from extproc.sim.time_model import TimeModel
from tests.support.sim_engine import SimEngine
from tests.support.vllm import ReplicaSpec

pytestmark = pytest.mark.timeout(300)

REQUESTS = 3
PATIENT_S = 0.5
"""How long the counts are watched for a change that must not come."""


async def counts(session: aiohttp.ClientSession, base_url: str) -> tuple[int, int]:
    """Running and waiting, as the page says."""
    found = {"running": 0, "waiting": 0}
    async with session.get(f"{base_url}/metrics") as reply:
        for line in (await reply.text()).splitlines():
            for name in found:
                if line.startswith(f"vllm:num_requests_{name}{{"):
                    found[name] = int(float(line.split()[-1]))
    return found["running"], found["waiting"]


async def ask(session: aiohttp.ClientSession, base_url: str, model: str) -> None:
    body = {"model": model, "prompt": "Count.", "max_tokens": 200, "ignore_eos": True}
    async with session.post(f"{base_url}/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()


def children(pid: int) -> Iterator[int]:
    """Every process below one."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from children(child)


async def until(session: aiohttp.ClientSession, base_url: str, expected: tuple[int, int]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + 30.0
    while (told := await counts(session, base_url)) != expected:
        assert loop.time() < end, f"{told} instead of {expected}"
        await asyncio.sleep(0.005)


async def check(base_url: str, model: str, pause: Callable[[], object], resume: Callable[[], object]) -> None:
    """`pause` keeps the engine from stepping; it has one place."""
    async with aiohttp.ClientSession() as session:
        await ask(session, base_url, model)
        await until(session, base_url, (0, 0))
        pause()
        try:
            asked = [asyncio.create_task(ask(session, base_url, model)) for _ in range(REQUESTS)]
            loop = asyncio.get_running_loop()
            watched_until = loop.time() + PATIENT_S
            while loop.time() < watched_until:
                assert await counts(session, base_url) == (0, 0)
                await asyncio.sleep(0.02)
        finally:
            resume()
        await until(session, base_url, (1, REQUESTS - 1))
        await asyncio.gather(*asked)
        await until(session, base_url, (0, 0))


async def test_a_simulated_engine_counts_what_a_step_has_left():
    async with SimEngine(max_num_seqs=1, time=TimeModel(base_ms=4.0)) as engine:
        await check(engine.base_url, "tiny", engine.pause, engine.resume)


@pytest.mark.vllm
async def test_a_real_engine_counts_what_a_step_has_left(vllm_pool):
    (replica,) = vllm_pool.start(ReplicaSpec(max_num_seqs=1))
    try:
        # The server goes on and answers; the engine's core, where steps are made, does not.
        cores = list(children(replica.pid))
        assert cores

        def send(number: signal.Signals) -> None:
            for core in cores:
                os.kill(core, number)

        await check(replica.base_url, "tiny", lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT))
    finally:
        replica.kill()
