"""Two routers lose each other under load: cut off, in silence, one way only, and when one of them dies."""

import pytest

from tests.chaos.pair_stack import ALONE, BOTH, EXCHANGED

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]


async def expect_together(pair, load):
    """They hear each other, and both take part again; nothing remains of the time apart."""
    await pair.until_peers_are_heard()
    begin = len(load.sent)
    await load.more(40)
    late = {sent.request_id for sent in load.sent[begin:] if sent.complete}

    def deciding():
        entries = pair.log_entries()
        return {entries[one]["router"] for one in late & entries.keys()}

    await pair.until(lambda: deciding() == set(BOTH))


async def test_peers_are_cut_off_and_find_each_other_again(pair):
    async with pair.load() as load:
        for _ in range(2):
            await load.more(40)
            alone, exchanged = pair.counts(ALONE), pair.counts(EXCHANGED)
            for wire in pair.peer_wires:
                await wire.cut()
            await pair.until_said(ALONE, alone)
            await load.more(60)
            for wire in pair.peer_wires:
                await wire.open()
            await pair.until_said(EXCHANGED, exchanged)
        await expect_together(pair, load)
    await pair.expect_unharmed(load)


async def test_peers_hear_nothing_over_connections_that_stay(pair):
    """What was told last, in the middle of requests, must not count for ever."""
    async with pair.load() as load:
        await load.more(40)
        for wire in pair.peer_wires:
            wire.stall()
        await pair.until_state(
            lambda state: all(peer["weight"] == 0.0 for peer in state["peers"]["peers"]),
            "what peers said is forgotten",
        )
        await load.more(60)
        for wire in pair.peer_wires:
            wire.flow()
        await expect_together(pair, load)
    await pair.expect_unharmed(load)


async def test_one_peer_hears_and_the_other_does_not(pair):
    async with pair.load() as load:
        await load.more(40)
        alone, exchanged = pair.said(0, ALONE), pair.said(0, EXCHANGED)
        await pair.peer_wires[1].cut()
        await pair.until(lambda: pair.said(0, ALONE) > alone)
        await load.more(60)
        await pair.peer_wires[1].open()
        await pair.until(lambda: pair.said(0, EXCHANGED) > exchanged)
        await expect_together(pair, load)
    await pair.expect_unharmed(load)


async def test_a_peer_is_killed_while_they_are_parted(pair):
    """It comes back behind the cut with nothing, and what it was serving died with it."""
    async with pair.load() as load:
        await load.more(40)
        for wire in pair.peer_wires:
            await wire.cut()
        await pair.routers[1].kill()
        await load.more(40)
        await pair.start_one(1)
        await load.more(40)
        exchanged = pair.counts(EXCHANGED)
        for wire in pair.peer_wires:
            await wire.open()
        await pair.until_said(EXCHANGED, exchanged)
        await expect_together(pair, load)
    await pair.expect_unharmed(load)
