"""Router, engines and Envoy are killed, paused and restarted under load."""

import asyncio
import signal

import pytest

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]


async def test_the_router_is_killed_and_started_again(stack):
    async with stack.load() as load:
        await load.more(40)
        await stack.router.kill()
        await load.more(40)  # served without it
        await stack.start_router()
        await stack.until_routing()
        await load.more(40)
    await stack.expect_unharmed(load)


async def test_the_router_is_killed_again_and_again(stack):
    async with stack.load() as load:
        for _ in range(3):
            await stack.router.kill()
            await stack.start_router()
            await load.more(10)
        await stack.until_routing()
    await stack.expect_unharmed(load)


async def test_the_router_is_paused(stack):
    async with stack.load() as load:
        await load.more(40)
        stack.signal_router(signal.SIGSTOP)
        try:
            await load.more(20)
        finally:
            stack.signal_router(signal.SIGCONT)
        await stack.until_routing()
        await load.more(40)
    await stack.expect_unharmed(load)


async def test_the_router_is_told_to_stop(stack):
    async with stack.load() as load:
        await load.more(40)
        assert await stack.router.stop(grace=20) == 0
        await load.more(20)
        await stack.start_router()
        await stack.until_routing()
        await load.more(40)
    await stack.expect_unharmed(load)


async def test_an_engine_is_killed_and_comes_back_empty(stack):
    victim = stack.engines[0]
    async with stack.load() as load:
        await load.more(40)
        await stack.kill_engine(victim)
        await load.more(40)
        await stack.until_ready(2)
        await victim.start()
        await stack.until_ready(3)
        await load.more(40)
    await stack.expect_unharmed(load)


async def test_an_engine_is_replaced_before_anybody_notices(stack):
    victim = stack.engines[1]
    async with stack.load() as load:
        for _ in range(3):
            await load.more(20)
            await stack.kill_engine(victim)
            await victim.start()
        await load.more(40)
    await stack.expect_unharmed(load)


async def test_an_engine_is_paused(stack):
    """What it has taken waits for it; what comes later does not."""
    victim = stack.engines[2]
    async with stack.load() as load:
        await load.more(40)
        victim.pause()
        try:
            await stack.until_ready(2)
            async with stack.load(seed=1) as later:
                await later.more(40)
        finally:
            victim.resume()
        await stack.until_ready(3)
        await load.more(40)
    load.sent += later.sent
    await stack.expect_unharmed(load)


async def test_all_engines_but_one_are_killed(stack):
    first, second, _ = stack.engines
    async with stack.load() as load:
        await load.more(40)
        await asyncio.gather(stack.kill_engine(first), stack.kill_engine(second))
        await load.more(40)
        await asyncio.gather(first.start(), second.start())
        await stack.until_ready(3)
        await load.more(40)
    await stack.expect_unharmed(load)


async def test_envoy_is_killed_and_started_again(stack):
    async with stack.load() as load:
        await load.more(40)
        await stack.kill_envoy()
        await stack.expect_no_leases()
        await stack.restart_envoy()
        await load.more(40)
    await stack.expect_unharmed(load)


async def test_envoy_is_paused(stack):
    async with stack.load() as load:
        await load.more(40)
        stack.signal_envoy(signal.SIGSTOP)
        try:
            await stack.expect_engines_idle()
        finally:
            stack.signal_envoy(signal.SIGCONT)
        await load.more(40)
    await stack.expect_unharmed(load)


async def test_router_and_engine_are_killed_at_once(stack):
    victim = stack.engines[0]
    async with stack.load() as load:
        await load.more(40)
        await asyncio.gather(stack.router.kill(), stack.kill_engine(victim))
        await load.more(40)
        await asyncio.gather(stack.start_router(), victim.start())
        await stack.until_routing()
        await load.more(40)
    await stack.expect_unharmed(load)
