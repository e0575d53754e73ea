"""Engines' metrics pages are slow, cut, garbage, gigantic, or full of numbers that are none, under load."""

import random
import re

import pytest

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]

_NUMBER = re.compile(rb"(?m)^(vllm:[^#\n]*) [-+.0-9eE]+$")


def every_number(value):
    return lambda page: _NUMBER.sub(rb"\1 " + value, page)


def noise(page):
    return random.Random(len(page)).randbytes(20_000)


def gigantic(page):
    return page + b'vllm:num_requests_running{engine="0",model_name="%s"} 1.0\n' % (b"x" * 100) * 400_000


def a_line_without_end(page):
    return b"vllm:num_requests_running{" * 100_000


def very_many_engines(page):
    line = b'vllm:num_requests_running{engine="%d",model_name="tiny"} 1.0\n'
    return page + b"".join(line % n for n in range(20_000))


UNREADABLE = {
    "noise": noise,
    "gigantic": gigantic,
    "reset": lambda page: None,
}
ODD = {
    "empty": lambda page: b"",
    "another page": lambda page: b"<html><body>Sign in, please.</body></html>",
    "cut in the middle": lambda page: page[: len(page) // 2],
    "a line without end": a_line_without_end,
    "very many engines": very_many_engines,
    "not a number": every_number(b"NaN"),
    "infinite": every_number(b"+Inf"),
    "negative": every_number(b"-7"),
    "beyond all bounds": every_number(b"1e300"),
}


async def test_a_page_cannot_be_read(wired):
    """An engine whose page is unreadable, three times in a row, is not used until it can be read again."""
    front = wired.fronts[0]
    async with wired.load() as load:
        for page in UNREADABLE.values():
            front.page = page
            await wired.until_ready(2)
            await load.more(20)
            front.honest()
            await wired.until_ready()
            await load.more(10)
    await wired.expect_unharmed(load)


async def test_a_page_says_what_cannot_be(wired):
    """Whatever it says, requests are served, and everything is as before when it is a page again."""
    front = wired.fronts[0]
    async with wired.load() as load:
        for page in ODD.values():
            front.page, asked = page, front.asked
            await wired.until(lambda before=asked: front.asked > before + 3, 60.0)
            await load.more(10)
            front.honest()
            await wired.until_ready()
            await load.more(5)
    await wired.expect_unharmed(load)


async def test_all_pages_are_garbage(wired):
    async with wired.load() as load:
        await load.more(20)
        for front in wired.fronts:
            front.page = every_number(b"NaN")
        await wired.until(lambda: all(front.asked > 5 for front in wired.fronts), 60.0)
        await load.more(40)
        for front in wired.fronts:
            front.honest()
        await wired.until_ready()
    await wired.expect_unharmed(load)


async def test_a_page_never_comes(wired):
    """Whoever serves nothing meanwhile is not used; the next test is about those who do."""
    front = wired.fronts[1]
    front.delay_s = 3600.0
    await wired.until_ready(2)
    async with wired.load() as load:
        await load.more(40)
        front.honest()
        await front.cut()
        await front.open()
        await wired.until_ready()
        await load.more(20)
    await wired.expect_unharmed(load)


async def test_no_page_comes_from_engines_that_serve(wired):
    """As if all were too busy for it: nobody is taken out, nothing is refused, with requests or without."""
    async with wired.load() as load:
        await load.more(20)
        for front in wired.fronts:
            front.delay_s = 3600.0
        await wired.until_state(
            lambda state: all(worker["scrape_failures"] > 3 for worker in state["workers"]),
            "pages have not come",
        )
        await load.more(40)
    # Now they have nothing to serve, and nothing to show.
    await wired.until_state(
        lambda state: all(worker["last_resort"] for worker in state["workers"]), "all are a last resort"
    )
    async with wired.load(seed=1) as more:
        await more.more(40)
        for front in wired.fronts:
            front.honest()
        await wired.until_state(
            lambda state: not any(worker["scrape_failures"] for worker in state["workers"]),
            "pages come",
        )
        await more.more(20)
    load.sent += more.sent
    for sent in load.sent:
        entry = await wired.decision(sent.request_id)
        assert entry["selected_worker"] is not None, entry
    await wired.expect_unharmed(load)


async def test_a_page_claims_to_be_longer_than_it_is(wired):
    front = wired.fronts[2]
    async with wired.load() as load:
        await load.more(20)
        front.length = 1 << 40
        await wired.until_ready(2)
        await load.more(40)
        front.honest()
        await wired.until_ready()
    await wired.expect_unharmed(load)
