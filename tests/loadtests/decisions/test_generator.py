import asyncio
import io
import json
import sys
import time

import pytest

from extproc.adapters.routing import HttpRequest
from extproc.core.types import Outcome
from extproc.protocol.ext_proc_messages import PassThrough, Route
from loadtests.decisions import generator
from tests.support.grpc_host import RecordingRouting, running
from tests.support.waiting import until

PLAN = {"shape": "short", "rate": 200.0, "seconds": 0.25, "seed": 1, "tickets": True}


@pytest.fixture
def begin(monkeypatch):
    """The word to begin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("begin\n"))
    monkeypatch.setattr(generator, "_SERVED_S", 0.02)


class Routing(RecordingRouting):
    def __init__(self):
        super().__init__(answer=self.decide)

    def decide(self, request: HttpRequest) -> Route:
        assert json.loads(request.body)["messages"]
        return Route(("10.0.0.1:8000",), f"lease-{len(self.requests)}")


async def test_every_request_is_answered_timed_and_ended(begin, capsys):
    routing = Routing()
    async with running(routing) as host:
        out = await generator.run(PLAN | {"address": host.server.address})
        await until(lambda: len(routing.completions) == len(routing.requests))
    assert json.loads(capsys.readouterr().out) == {"ready": 50, "failed": 0}
    assert len(out["times_ms"]) + 50 == len(routing.requests)
    assert out["failed"] == 0
    assert min(out["times_ms"]) > 0.0
    assert len({lease for lease, _ in routing.completions}) == len(routing.requests)
    assert {done.outcome for _, done in routing.completions} == {Outcome.FINISHED}
    assert len({request.request_id for request in routing.requests}) == len(routing.requests)


async def test_answers_without_a_worker_are_failures(begin, capsys):
    routing = RecordingRouting(answer=PassThrough())
    async with running(routing) as host:
        out = await generator.run(PLAN | {"address": host.server.address})
    assert out["times_ms"] == []
    assert out["failed"] == len(routing.requests)
    capsys.readouterr()


async def test_a_router_that_stalls_is_charged_for_all_that_waited():
    routing = Routing()
    async with running(routing) as host:
        made = generator.Generator(host.server.address, tickets=False)
        figures = generator.Figures()
        routing.gate = asyncio.Event()
        due = time.perf_counter() - 5.0  # it should have left long ago
        asking = asyncio.create_task(made.ask(b'{"model":"tiny","messages":[1]}', due, figures))
        await until(lambda: routing.requests)
        routing.gate.set()
        await asking
        await made.close()
    assert figures.times_ms[0] > 5000.0
