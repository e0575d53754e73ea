"""Envoy's access log does not reach the router: nobody tells it of the end of requests."""

import pytest

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]


async def test_the_access_log_is_cut(wired):
    async with wired.load() as load:
        await load.more(40)
        await wired.log_wire.cut()
        await load.more(60)
        await wired.log_wire.open()
        await load.more(40)
    await wired.expect_unharmed(load)


async def test_the_access_log_flaps(wired):
    async with wired.load() as load:
        for _ in range(5):
            await wired.log_wire.cut()
            await load.more(10)
            await wired.log_wire.open()
            await load.more(10)
    await wired.expect_unharmed(load)


async def test_the_access_log_stalls(wired):
    """The connection is there and nothing comes of it; then all comes at once."""
    async with wired.load() as load:
        await load.more(40)
        wired.log_wire.stall()
        await load.more(60)
        wired.log_wire.flow()
        await load.more(40)
    await wired.expect_unharmed(load)


async def test_the_access_log_stalls_and_is_lost(wired):
    async with wired.load() as load:
        wired.log_wire.stall()
        await load.more(60)
        await wired.log_wire.cut()
        wired.log_wire.flow()
        await wired.log_wire.open()
        await load.more(40)
    await wired.expect_unharmed(load)
