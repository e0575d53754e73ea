import asyncio
import json
import os

import aiohttp
import pytest
import yaml

from extproc import config as configuration
from extproc.adapters.child_process import ChildError, ChildProcess
from extproc.demo import stack as stack_module
from extproc.demo.stack import Engine, Stack, StackSettings, audit
from tests.support.envoy import require_envoy
from tests.support.waiting import until


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.envoy
async def test_a_whole_installation_runs_and_ends(tmp_path):
    require_envoy()
    stages = []
    stack = Stack(StackSettings("token-load", engines=2), tmp_path, stages.append)
    async with stack, aiohttp.ClientSession(stack.url) as session:
        body = {"model": stack.model, "prompt": "hello " * 50, "max_tokens": 2}
        for _ in range(2):
            async with session.post("/v1/completions", json=body) as reply:
                assert reply.status == 200
        await until(lambda: audit(stack.decisions)[1] == 2)
    assert audit(stack.decisions) == (2, 2)
    assert [stage.split()[1] for stage in stages] == ["2", "the", "Envoy"]


class Children:
    """Every child the stack made, to see that none is left."""

    def __init__(self, monkeypatch):
        self.made = []
        original = ChildProcess.start

        async def start(child):
            await original(child)
            self.made.append(child)

        monkeypatch.setattr(ChildProcess, "start", start)

    def all_ended(self):
        return self.made and not any(child.running or alive(child.pid) for child in self.made)


async def test_when_one_engine_does_not_start_none_is_left(tmp_path, monkeypatch):
    children = Children(monkeypatch)
    original = Stack._engine

    async def engine(stack, number):
        if number == 1:
            await until(lambda: children.made)
            raise ChildError("engine 1 does not start")
        if number == 2:
            await until(children.all_ended)
        return await original(stack, number)

    monkeypatch.setattr(Stack, "_engine", engine)
    with pytest.raises(ChildError, match="engine 1 does not start"):
        async with Stack(StackSettings("token-load", engines=3), tmp_path):
            pytest.fail("it must not start")
    assert asyncio.all_tasks() == {asyncio.current_task()}  # nobody who might start another one
    assert children.all_ended()


async def test_an_engine_that_ends_is_reported_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_module.sys, "executable", "/bin/false")
    with pytest.raises(ChildError, match="ended"):
        async with Stack(StackSettings("token-load", engines=1), tmp_path):
            pytest.fail("it must not start")


async def test_what_is_not_ready_in_time_is_reported_and_ended(tmp_path, monkeypatch):
    children = Children(monkeypatch)
    settings = StackSettings("token-load", engines=2, start_deadline_s=0.05)
    with pytest.raises(ChildError, match="not ready in 0 s"):
        async with Stack(settings, tmp_path):
            pytest.fail("it must not start")
    assert children.all_ended()


async def test_cancelled_while_starting_it_leaves_nothing(tmp_path, monkeypatch):
    children = Children(monkeypatch)
    starting = asyncio.create_task(Stack(StackSettings("token-load", engines=3), tmp_path).__aenter__())
    await until(lambda: len(children.made) == 3)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children.all_ended()


def test_the_routers_configuration_is_what_a_user_would_write(tmp_path):
    engines = [
        Engine(None, f"127.0.0.1:800{n}", f"tcp://127.0.0.1:555{n}", f"tcp://127.0.0.1:556{n}")
        for n in (1, 2)
    ]
    config = Stack(StackSettings("least-load"), tmp_path).router_config(engines)
    loaded = configuration.parse(yaml.safe_dump(config))
    assert loaded.policy == "least-load"
    assert [worker.endpoint for worker in loaded.pools[0].discovery.static] == [
        "127.0.0.1:8001",
        "127.0.0.1:8002",
    ]
    assert loaded.pools[0].discovery.static[1].kv_replay == "tcp://127.0.0.1:5562"


def test_the_audit_counts_what_can_be_compared(tmp_path):
    path = tmp_path / "decisions.jsonl"
    assert audit(path) == (0, 0)
    pairs = [(0, 0), (16, 16), (16, 0), (None, 3), (3, None)]
    lines = [{"predicted_cached_tokens": p, "actual_cached_tokens": a} for p, a in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert audit(path) == (2, 3)
