"""KV events that stop, and engines that restart, behind the whole product: what is predicted afterwards."""

import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from extproc.demo.workload import prose
from tests.support.full_stack import FullStack, Worker
from tests.support.sim_engine import SimEngine

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(300)]

ENGINES = 3
DOCUMENTS = 24
SOON = 50  # requests after which belief must be right again
SCRAPES = {"interval_s": 0.1, "timeout_s": 10.0, "failure_limit": 3}


class Traffic:
    """Questions on documents, of which a third fits on an engine."""

    def __init__(self, stack):
        self.stack = stack
        self.rng = random.Random(4)
        self.documents = [prose(self.rng, 250) for _ in range(DOCUMENTS)]

    def size(self):
        return self.stack.decisions.stat().st_size

    async def ask(self, requests):
        """The log lines of so many questions, one after the other."""
        replies = []
        for _ in range(requests):
            text = f"{self.rng.choice(self.documents)} Question {self.rng.random()}"
            size = self.size()
            replies.append(await self.stack.chat(text, max_tokens=2))
            await self.stack.until(lambda before=size: self.size() > before)  # it has ended for us, too
        assert {reply.status for reply in replies} == {200}
        await self.stack.decision(replies[-1].request_id)
        entries = self.stack.log_entries()
        return [entries[reply.request_id] for reply in replies]


@asynccontextmanager
async def fleet(tmp_path, *, replay):
    async with AsyncExitStack() as opened:
        engines = [
            await opened.enter_async_context(SimEngine(num_gpu_blocks=200, max_model_len=3000))
            for _ in range(ENGINES)
        ]
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay if replay else None) for e in engines]
        pool = {} if replay else {"kv_events": {"replay": None}}
        stack = FullStack(tmp_path, workers, settings={"scrape": SCRAPES}, pool=pool)
        await opened.enter_async_context(stack)
        await stack.until_subscribed(ENGINES)
        traffic = Traffic(stack)
        await traffic.ask(30)
        await stack.until_complete(ENGINES)
        yield stack, engines, traffic


async def until_asked(traffic, engine, lines, least=11):
    """Go on until so many of `lines`, and those that come, chose the engine."""
    while len(split(lines, engine)[0]) < least:
        assert len(lines) < 400, f"{engine.endpoint} is hardly used"
        lines += await traffic.ask(20)
    return lines


def split(lines, engine):
    """(those that chose the engine, the others)."""
    chosen = [line for line in lines if line["selected_worker"] == engine.endpoint]
    return chosen, [line for line in lines if line["selected_worker"] != engine.endpoint]


def false_credit(lines):
    predicted = sum(line["predicted_cached_tokens"] for line in lines)
    false = sum(max(0, line["predicted_cached_tokens"] - line["actual_cached_tokens"]) for line in lines)
    return false / max(1, predicted)


def cached_share(lines):
    return sum(line["actual_cached_tokens"] for line in lines) / sum(line["prompt_tokens"] for line in lines)


def exact(lines):
    return [
        (line["predicted_cached_tokens"], line["actual_cached_tokens"])
        for line in lines
        if line["predicted_cached_tokens"] != line["actual_cached_tokens"]
    ] == []


async def test_a_stream_that_dies_without_a_sound(tmp_path):
    async with fleet(tmp_path, replay=False) as (stack, engines, traffic):
        before = (await traffic.ask(90))[-40:]
        assert exact(before)
        victim = engines[0]
        victim.faults.lose_events = True
        await traffic.ask(SOON)
        await stack.until(lambda: f"worker {victim.endpoint}: KV events have stopped" in stack.router_log())
        after = await until_asked(traffic, victim, await traffic.ask(90))
        hit, others = split(after, victim)
        assert false_credit(after) < 0.01
        # A document that went unheard may be claimed once, and is found out by that: one request is more than
        # a hundredth of those that the victim got, until the claims have been tried.
        assert false_credit(hit[len(hit) // 2 :]) < 0.01
        assert exact(others)
        assert cached_share(after) > 0.85 * cached_share(before)  # nothing was forgotten


async def test_an_engine_that_restarts_while_requests_go_on(tmp_path):
    async with fleet(tmp_path, replay=True) as (_, engines, traffic):
        before = (await traffic.ask(90))[-40:]
        assert exact(before)
        victim = engines[0]
        await victim.kill()
        away = await traffic.ask(5)
        assert {line["outcome"] for line in away} == {"finished"}
        await victim.restart()
        soon = await traffic.ask(SOON)
        after = await until_asked(traffic, victim, await traffic.ask(60))
        _, others = split([*soon, *after], victim)
        assert false_credit(soon) < 0.01
        assert exact(others)
        assert exact(split(after, victim)[0])
        assert cached_share(after) > 0.85 * cached_share(before)
