import asyncio

import pytest

from extproc.adapters.turns import Turns


class Clock:
    """Each piece of work takes a millisecond."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.reads // 2 * 0.001


async def test_after_each_slice_the_loop_goes_round_whoever_had_the_turn() -> None:
    turns, log = Turns(Clock(), 0.0025), []

    async def work(name: str) -> None:
        for _ in range(6):
            async with turns:
                log.append(name)

    async def request() -> None:
        while sum(name != "request" for name in log) < 18:
            log.append("request") if log and log[-1] != "request" else None
            await asyncio.sleep(0)

    await asyncio.gather(request(), *(work(name) for name in "abc"))
    served = "".join("|" if name == "request" else "." for name in log)
    assert max(map(len, served.split("|"))) <= 3
    assert sorted(name for name in log if name != "request") == sorted("abc" * 6)


async def test_work_that_fails_gives_its_turn_back() -> None:
    turns = Turns(Clock(), 0.0)
    with pytest.raises(ZeroDivisionError):
        async with turns:
            1 / 0  # noqa: B018 - what fails does not matter
    async with asyncio.timeout(5), turns:
        pass


async def test_a_task_that_is_cancelled_while_it_pauses_gives_its_turn_back() -> None:
    turns = Turns(Clock(), 0.0)

    async def work() -> None:
        async with turns:
            pass

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(5), turns:
        pass
