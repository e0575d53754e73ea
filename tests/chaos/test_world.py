"""Clocks jump, and names change their meaning or lose it."""

import signal

import pytest

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]

DAY_S = 24 * 3600.0


async def test_the_wall_clock_jumps(odd):
    async with odd.load() as load:
        for where in (-DAY_S, DAY_S, 0.0):
            odd.world.say(wall_s=where)
            odd.signal_router(signal.SIGUSR1)
            await load.more(30)
    await odd.expect_unharmed(load)


async def test_hours_pass_in_a_moment(odd):
    """As in a virtual machine that was suspended: every deadline is over, and nothing has changed."""
    async with odd.load() as load:
        for _ in range(3):
            await load.more(20)
            odd.passed_s += 6 * 3600.0
            odd.world.say(monotonic_s=odd.passed_s)
            odd.signal_router(signal.SIGUSR1)
            await load.more(20)
    await odd.expect_unharmed(load)


async def test_a_name_cannot_be_resolved(odd):
    async with odd.load() as load:
        for lost in (None, []):  # no answer, and an empty one
            odd.resolve_to(lost)
            await load.more(40)
            await odd.until_ready(3)
            odd.resolve_to(odd.hosts)
            await load.more(10)
    await odd.expect_unharmed(load)


async def test_a_name_flaps_between_workers(odd):
    async with odd.load() as load:
        for _ in range(3):
            odd.resolve_to(odd.hosts[:1])
            await odd.until_ready(1)
            await load.more(10)
            odd.resolve_to(odd.hosts[1:])
            await odd.until_ready(2)
            await load.more(10)
        odd.resolve_to(odd.hosts)
        await odd.until_ready(3)
        await load.more(20)
    await odd.expect_unharmed(load)


async def test_a_name_means_one_thing_and_another_by_turns(odd):
    """Each answer lacks some: nobody leaves for being missing once."""
    hosts = odd.hosts
    async with odd.load() as load:
        for turn in range(20):
            odd.resolve_to([hosts[turn % 3], hosts[(turn + 1) % 3]])
            await load.more(3)
        odd.resolve_to(hosts)
        await odd.until_ready(3)
    await odd.expect_unharmed(load)
