"""The processes that encode long prompts are killed and paused under load."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]

LONG = 270_000  # bytes: more than the router's own threads encode


async def encoding(stack, load):
    """Ids of the processes, when there are some."""
    while not stack.prompt_processes():
        await load.more(5)
    return stack.prompt_processes()


def lives(pid):
    """Whether it is there, and not only because nobody has asked how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_they_are_killed_again_and_again(stack):
    async with stack.load(padding=LONG) as load:
        for _ in range(5):
            for pid in await encoding(stack, load):
                os.kill(pid, signal.SIGKILL)
            await load.more(20)
        assert await encoding(stack, load)
    await stack.expect_unharmed(load)


async def test_one_is_paused(stack):
    async with stack.load(padding=LONG) as load:
        await encoding(stack, load)
        await load.more(60)  # it has been given some
        pid = stack.prompt_processes()[0]
        os.kill(pid, signal.SIGSTOP)
        await load.more(40)  # those that it has are routed by load in time
        await until(lambda: pid not in stack.prompt_processes(), 60.0, "it is ended")
        await load.more(20)
        assert await encoding(stack, load)
    await stack.expect_unharmed(load)


async def test_they_end_with_the_router(stack):
    async with stack.load(padding=LONG) as load:
        pids = await encoding(stack, load)
        await stack.router.kill()
        await until(lambda: not any(map(lives, pids)), 30.0, "they have ended")
        await load.more(20)
        await stack.start_router()
        await stack.until_routing()
        await load.more(20)
    await stack.expect_unharmed(load)
