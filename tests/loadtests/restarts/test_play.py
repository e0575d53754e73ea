import asyncio
import itertools
import json
import time

import pytest

from extproc.core.errors import WarmrouteError
from loadtests.restarts.play import Load, Plan, play
from loadtests.restarts.routers import Restart
from loadtests.restarts.workload import QUICK, bodies
from tests.support.sim_engine import SimEngine

PLAN = Plan(rounds=2, warm_up_s=0.1, control_s=0.1, steady_s=0.05, rate=50.0)


class Routers:
    """What is done to them."""

    def __init__(self):
        self.down = set()
        self.told = []

    async def restart(self, number):
        stop_at = time.perf_counter()
        self.down.add(number)
        self.told.append((number, frozenset(self.down)))
        await asyncio.sleep(0.02)
        self.down.discard(number)
        return Restart("AB"[number], stop_at, stop_at, time.perf_counter())


async def test_every_round_has_its_control_and_every_scenario_under_one_load():
    routers, told = Routers(), []
    async with SimEngine(num_gpu_blocks=8192) as engine:
        load = Load(engine.endpoint, bodies(QUICK, "tiny", 1), PLAN.rate, 1)
        runs = await play(routers, load, PLAN, told.append)
        assert engine.model.running == 0  # what was sent was awaited
    assert [(run.round, run.scenario) for run in runs] == list(
        itertools.product((0, 1), ("control", "rolling", "quick", "together"))
    )
    assert [len(run.restarts) for run in runs] == [0, 2, 2, 2] * 2
    alone = [(0, {0}), (1, {1})]
    assert routers.told == [*alone, *alone, (0, {0}), (1, {0, 1})] * 2
    for before, after in itertools.pairwise(runs):
        assert before.period.end <= after.period.begin
    assert not load.failures
    assert len(load.samples) == len(load.sent) > 0
    assert "round 2 of 2: together" in told


async def test_failures_are_kept_with_their_time():
    async with SimEngine() as engine:
        engine.faults.status = 503
        load = Load(engine.endpoint, bodies(QUICK, "tiny", 1), PLAN.rate, 1)
        runs = await play(Routers(), load, PLAN, lambda _: None)
    assert load.samples == []
    assert len(load.failures) == len(load.sent) > 0
    assert all("503" in text for _, text in load.failures)
    assert all(at < runs[-1].period.end + 1 for at, _ in load.failures)


async def test_the_load_ends_when_a_router_does_not_come_back():
    class Broken(Routers):
        async def restart(self, number):
            raise WarmrouteError("did not start")

    async with SimEngine(num_gpu_blocks=8192) as engine:
        load = Load(engine.endpoint, bodies(QUICK, "tiny", 1), PLAN.rate, 1)
        with pytest.raises(WarmrouteError, match="did not start"):
            await play(Broken(), load, PLAN, lambda _: None)
        assert engine.model.running == 0


async def test_answers_that_are_cut_are_failures():
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"no": "stream"}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        load, stop = Load(address, bodies(QUICK, "tiny", 1), 100.0, 1), asyncio.Event()
        sending = asyncio.create_task(load.run(stop))
        while not load.failures:  # noqa: ASYNC110 - it says nothing when there is one
            await asyncio.sleep(0.01)
        stop.set()
        await sending
    assert load.samples == []
    assert len(load.failures) == len(load.sent)
