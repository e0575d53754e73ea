"""Several routers in front of one fleet, as processes behind a real Envoy: they agree, part, are replaced."""

import asyncio
import itertools
import os
import random
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from extproc.adapters.child_process import ChildProcess
from extproc.demo.workload import prose
from extproc.sim.time_model import TimeModel
from tests.support.decision_lines import DecisionLines
from tests.support.full_stack import FullStack, Worker
from tests.support.ports import free_port, free_ports
from tests.support.sim_engine import SimEngine
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until

pytestmark = pytest.mark.envoy

QUICK = TimeModel(base_ms=3.0, prefill_ms_per_token=0.02)


class Replicas(FullStack):
    """Two routers, each `warmroute serve` with a configuration of its own; `number` says which."""

    def __init__(self, directory, workers, *, wires=None, **settings):
        self.ports, self.peers, self.admins = free_ports(2), free_ports(2), free_ports(2)
        self._wires = wires
        listening = [f"127.0.0.1:{port}" for port in self.ports]
        envoy = {"message_timeout_s": 10, "router": listening}
        super().__init__(directory, workers, settings={"envoy": envoy, **settings})
        self.logs = [DecisionLines(directory / f"decisions-{number}.jsonl") for number in (0, 1)]
        self.routers = [None, None]
        self.lives = [0, 0]

    async def start_router(self):
        for number in (0, 1):
            await self.start_one(number)
        self.router = self.routers[0]

    async def stop_router(self):
        for child in self.routers:
            if child is not None:
                await child.stop()

    async def start_one(self, number):
        other = 1 - number
        target = f"127.0.0.1:{self.peers[other]}" if self._wires is None else self._wires[other].endpoint
        config = self.directory / f"router-{number}.yaml"
        settings = {
            **self.settings,
            "listen": f"127.0.0.1:{self.ports[number]}",
            "admin": {"listen": f"127.0.0.1:{self.admins[number]}"},
            "decision_log": {"path": str(self.logs[number].path)},
            "peers": {
                "listen": f"127.0.0.1:{self.peers[number]}",
                "static": [target],
                "fade_after_s": 0.5,
                "gone_after_s": 1.5,
            },
        }
        config.write_text(yaml.safe_dump(settings))
        self.lives[number] += 1
        log = self.directory / f"replica-{number}-{self.lives[number]}.log"
        child = self.routers[number] = ChildProcess(
            [sys.executable, "-m", "extproc", "serve", "-c", str(config)], log
        )
        await child.start()
        await until(lambda: "listening on" in child.log_tail(200) or not child.running, 60)
        assert child.running, child.log_tail()

    def said(self, number, text):
        return text in self.routers[number].log.read_text()

    def log_entries(self):
        return {
            one: {**entry, "replica": number}
            for number, log in enumerate(self.logs)
            for one, entry in log.entries().items()
        }

    async def state(self, number):
        async with aiohttp.request("GET", f"http://127.0.0.1:{self.admins[number]}/api/state") as reply:
            return await reply.json()

    async def exchanged(self):
        await self.until(lambda: all(self.said(n, "load is exchanged") for n in (0, 1)))


@asynccontextmanager
async def fleet(tmp_path, count=3, **settings):
    engines = [SimEngine(time=QUICK) for _ in range(count)]
    try:
        for engine in engines:
            await engine.__aenter__()
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in engines]
        async with Replicas(tmp_path, workers, **settings) as stack:
            await stack.exchanged()
            yield stack, engines
    finally:
        for engine in engines:
            await engine.__aexit__(None, None, None)


class Sessions:
    """Growing conversations; `share` is the share of prompt tokens found cached, of the latest turns."""

    def __init__(self, stack, count=8, seed=3):
        self.stack, self.rng = stack, random.Random(seed)
        self.sessions = [[self.turn()] for _ in range(count)]
        self.answers = []

    def turn(self):
        return {"role": "user", "content": prose(self.rng, 60)}

    async def run(self, stop):
        await asyncio.gather(*(self.one(number, stop) for number in range(len(self.sessions))))

    async def one(self, number, stop):
        for turns in itertools.count():
            if stop.is_set():
                return
            session = self.sessions[number]
            reply = await self.stack.chat(session, max_tokens=4)
            usage = reply.usage or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.answers.append((reply.status, cached, usage.get("prompt_tokens", 0), reply.request_id))
            session += [{"role": "assistant", "content": reply.text}, self.turn()]
            if turns % 12 == 11:
                del session[2:]  # the beginning stays

    def share(self, answers):
        return sum(cached for _, cached, _, _ in answers) / max(1, sum(tokens for _, _, tokens, _ in answers))

    async def more(self, count):
        goal = len(self.answers) + count
        await self.stack.until(lambda: len(self.answers) >= goal)
        return self.answers[goal - count : goal]


async def test_both_replicas_decide_and_each_request_ends_at_its_own(tmp_path):
    async with fleet(tmp_path) as (stack, _):
        replies = [await stack.chat(f"Hello {n}.") for n in range(12)]
        entries = [await stack.decision(reply.request_id) for reply in replies]
        assert {entry["replica"] for entry in entries} == {0, 1}
        assert {entry["outcome"] for entry in entries} == {"finished"}


async def test_a_partition_leaves_independent_routers_and_heals_by_itself(tmp_path):
    peers = free_ports(2)
    async with TcpProxy(f"127.0.0.1:{peers[0]}") as a, TcpProxy(f"127.0.0.1:{peers[1]}") as b:
        engines = [SimEngine(time=QUICK), SimEngine(time=QUICK)]
        async with engines[0], engines[1]:
            workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in engines]
            stack = Replicas(tmp_path, workers, wires=(a, b))
            stack.peers = peers
            async with stack:
                await stack.exchanged()
                await a.cut()
                await b.cut()
                await stack.until(lambda: all(stack.said(n, "we go on alone") for n in (0, 1)))
                replies = await asyncio.gather(*(stack.chat(f"Alone {n}?") for n in range(20)))
                assert [reply.status for reply in replies] == [200] * 20
                entries = [await stack.decision(reply.request_id) for reply in replies]
                assert {entry["replica"] for entry in entries} == {0, 1}
                await a.open()
                await b.open()
                await stack.until(
                    lambda: all(
                        stack.routers[n].log.read_text().count("load is exchanged") >= 2 for n in (0, 1)
                    )
                )
                assert (await stack.chat("Together again?")).status == 200


async def test_a_rolling_restart_of_both_under_load_loses_no_request_and_stays_warm(tmp_path):
    async with fleet(tmp_path) as (stack, _):
        load, stop = Sessions(stack), asyncio.Event()
        running = asyncio.create_task(load.run(stop))
        try:
            await load.more(40)  # warm
            before = load.share(await load.more(60))
            shares = []
            for number in (0, 1):
                await stack.routers[number].stop(grace=20)
                shares.append(load.share(await load.more(24)))
                await stack.start_one(number)
                assert stack.said(number, "tells of")
                shares.append(load.share(await load.more(24)))
            after = load.share(await load.more(60))
        finally:
            stop.set()
            await running
        assert {status for status, *_ in load.answers} == {200}
        assert after > before - 0.1
        assert min(shares) > before - 0.25  # some requests pass by a router that is being replaced
        late = [request_id for *_, request_id in load.answers[-20:]]
        for request_id in late:
            entry = await stack.decision(request_id)
            assert entry["predicted_cached_tokens"] <= entry["actual_cached_tokens"]


async def test_processes_of_one_serve_share_a_port_and_one_that_is_killed_comes_back(tmp_path):
    port = free_port()
    async with SimEngine(time=QUICK) as one, SimEngine(time=QUICK) as two:
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in (one, two)]
        settings = {"processes": 2, "listen": f"127.0.0.1:{port}", "admin": {"listen": ""}}
        settings["envoy"] = {"message_timeout_s": 10, "router": [f"127.0.0.1:{port}"]}
        settings["decision_log"] = {"path": "-"}  # whole lines of both, in the log
        async with FullStack(tmp_path, workers, settings=settings) as stack:
            stack.decisions = stack.router.log

            def exchanged():
                return stack.router_log().count("load is exchanged")

            await stack.until(lambda: exchanged() >= 2)
            replies = await asyncio.gather(*(stack.chat(f"Hello {n}.") for n in range(30)))
            assert {reply.status for reply in replies} == {200}
            ids = {reply.request_id for reply in replies}
            await stack.until(lambda: ids <= stack.log_entries().keys())
            assert {stack.log_entries()[one]["outcome"] for one in ids} == {"finished"}

            children = _children(stack.router.pid)
            assert len(children) == 2
            os.kill(children[0], signal.SIGKILL)
            replies = await asyncio.gather(*(stack.chat(f"Killed {n}?") for n in range(30)))
            assert {reply.status for reply in replies} == {200}
            await stack.until(lambda: "starts again" in stack.router_log() and exchanged() >= 4)
            assert await stack.router.stop(grace=30) == 0
            assert all(_gone(child) for child in children)


async def test_a_single_router_begins_with_its_snapshot(tmp_path):
    async with SimEngine(time=QUICK) as one, SimEngine(time=QUICK) as two:
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in (one, two)]
        settings = {"peers": {"snapshot": {"path": str(tmp_path / "index")}}}
        async with FullStack(tmp_path, workers, settings=settings) as stack:
            document = prose(random.Random(1), 300)
            warm = await stack.until_warm(document)
            await stack.stop_router()
            assert (tmp_path / "index").exists()
            await two.restart()
            await stack.start_router()
            assert "the snapshot tells of" in stack.router_log()
            again = await stack.until_warm(document)
            assert again["predicted_cached_tokens"] <= again["actual_cached_tokens"]
            if warm["served_by"] == one.endpoint:
                assert again["served_by"] == one.endpoint


def _children(pid):
    """The routers of a supervisor."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [
        child for child in map(int, text.split()) if b"--place" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def _gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
