"""The wire of KV events breaks, loses, reorders, repeats, corrupts and lies, under load."""

import random

import pytest

from tests.support.kv_proxy import corrupt, lose, reorder, repeat

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]

TAMPERED = 15
LIVE = {
    "lost": lambda rng: lose(0.3, rng),
    "repeated": lambda rng: repeat(0.3, rng),
    "reordered": lambda rng: reorder(4, rng),
    "corrupted": lambda rng: corrupt(0.2, rng),
}


def without_some(rng):
    """Messages are missing in the middle."""
    return lambda messages: [message for message in messages if rng.random() < 0.7]


def without_an_end(rng):
    return lambda messages: messages[: len(messages) // 2]


def nothing(rng):
    return lambda messages: []


def shuffled(rng):
    return lambda messages: rng.sample(messages, len(messages))


def under_other_numbers(rng):
    """Every payload is the one of another message."""

    def lie(messages):
        payloads = [message.payload for message in messages]
        rng.shuffle(payloads)
        return [
            message._replace(payload=payload) for message, payload in zip(messages, payloads, strict=True)
        ]

    return lie


def noise(rng):
    return lambda messages: [message._replace(payload=rng.randbytes(50)) for message in messages]


REPLAYS = [without_some, without_an_end, nothing, shuffled, under_other_numbers, noise]


@pytest.mark.parametrize("what", LIVE)
async def test_live_messages_are(wired, what):
    wired.deceived = what == "corrupted"  # what could not be read is missing for good
    async with wired.load() as load:
        await load.more(40)
        for number, wire in enumerate(wired.wires):
            wire.live = LIVE[what](random.Random(number))
        await wired.until(lambda: sum(wire.changed for wire in wired.wires) >= TAMPERED)
        for wire in wired.wires:
            wire.honest()
        await load.more(40)
    await wired.expect_unharmed(load)


async def test_the_connection_is_cut_again_and_again(wired):
    async with wired.load() as load:
        for _ in range(4):
            for wire in wired.wires:
                await wire.cut()
            await load.more(20)
            for wire in wired.wires:
                await wire.open()
            await load.more(10)
        await wired.until_trusted()
    await wired.expect_unharmed(load)


@pytest.mark.parametrize("lie", REPLAYS)
async def test_the_answer_to_a_router_that_starts_is(wired, lie):
    """All it knows is what it is told at the start, and that is not the truth."""
    wired.deceived = True
    async with wired.load() as load:
        await load.more(40)
        for number, wire in enumerate(wired.wires):
            wire.replay = lie(random.Random(number))
            wire.end_marker = lie is not without_an_end
        await wired.router.kill()
        await wired.start_router()
        await wired.until_routing()
        await load.more(60)
        for wire in wired.wires:
            assert wire.asked
            wire.honest()
        await load.more(40)
    await wired.expect_unharmed(load)


async def test_the_answer_after_a_gap_is_a_lie(wired):
    wired.deceived = True
    async with wired.load() as load:
        for number, wire in enumerate(wired.wires):
            wire.live = lose(0.3, random.Random(number))
            wire.replay = under_other_numbers(random.Random(number))
        await load.more(60)
        for wire in wired.wires:
            wire.honest()
        await load.more(40)
    await wired.expect_unharmed(load)


async def test_an_engine_restarts_behind_a_wire_that_is_down(wired):
    """Nobody sees the connection to it end, and its numbers begin again."""
    async with wired.load() as load:
        await load.more(40)
        await wired.wires[0].cut()
        await wired.kill_engine(wired.engines[0])
        await wired.engines[0].start()
        await load.more(40)
        await wired.wires[0].open()
        await load.more(40)
        await wired.until_trusted()
    await wired.expect_unharmed(load)
