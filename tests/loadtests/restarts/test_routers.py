import asyncio
import json

from loadtests.live.fleet import Engine, Fleet
from loadtests.restarts.routers import Routers


def routers(tmp_path):
    return Routers(Fleet("simulated", (Engine("127.0.0.1:1", None, None, ""),), 16), tmp_path)


def write(path, *ids, end="\n"):
    with path.open("a") as file:
        file.write("\n".join(json.dumps({"request_id": one}) for one in ids) + end)


def test_what_either_placed_was_placed_and_half_a_line_is_none(tmp_path):
    both = routers(tmp_path)
    assert both.decided() == set()
    write(both.decisions[0], "a", "b")
    write(both.decisions[1], "c")
    write(both.decisions[1], "d", end="")
    assert both.decided() == {"a", "b", "c"}


async def test_lines_that_come_late_are_waited_for(tmp_path):
    both = routers(tmp_path)
    write(both.decisions[0], "a")
    waiting = asyncio.create_task(both.logged(["a", "b"]))
    await asyncio.sleep(0)
    assert not waiting.done()
    write(both.decisions[1], "b")
    await waiting
    assert both.decided() == {"a", "b"}


def test_each_is_the_others_peer(tmp_path):
    both = routers(tmp_path)
    one, two = (both._config(number) for number in (0, 1))  # what is written into their files
    assert one["peers"]["static"] == [two["peers"]["listen"]]
    assert two["peers"]["static"] == [one["peers"]["listen"]]
    assert one["envoy"]["router"] == [one["listen"], two["listen"]]
