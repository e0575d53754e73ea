"""There is no room for what the router writes: its disk is full, or nobody empties the pipe."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from extproc.adapters.child_process import ChildProcess
from tests.chaos.stack import ChaosStack

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="package")]


# The router with both outputs in a FIFO. Opened for reading too: that does not wait for a reader.
_INTO_PIPE = """
import os, sys
pipe = os.open({fifo!r}, os.O_RDWR)
os.dup2(pipe, 1)
os.dup2(pipe, 2)
os.execv(sys.executable, [sys.executable, "-m", "extproc", *sys.argv[1:]])
"""


def is_stopped(pid):
    """What it was writing when it was told to stop has been written."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_the_disk_is_full_and_has_room_again(stack):
    """Decision log and standard error alike: files may not grow at all."""
    async with stack.load() as load:
        await load.more(20)
        stack.limit_files(0)
        await load.more(60)
        await stack.until_state(
            lambda state: any("decision log" in json.dumps(warning) for warning in state["warnings"]),
            "it says that lines are lost",
        )
        # A worker leaves and comes back: there is much to tell of.
        await stack.kill_engine(stack.engines[0])
        await stack.until_ready(2)
        await load.more(20)
        await stack.engines[0].start()
        await stack.until_ready()
        stack.limit_files(-1)
        await stack.until_routing()
        await load.more(20)
    await stack.expect_unharmed(load)


async def test_nobody_empties_the_pipe_of_its_output(tmp_path):
    """As when a log collector hangs. Decision log and all that is said go into one pipe of 64 KiB."""
    fifo, collected = tmp_path / "output", tmp_path / "router-1.log"
    os.mkfifo(fifo)
    wrapper = tmp_path / "into_pipe.py"
    wrapper.write_text(_INTO_PIPE.format(fifo=str(fifo)))
    collector = ChildProcess(["cat", str(fifo)], collected)
    settings = {"decision_log": {"path": "-"}}
    program = (sys.executable, str(wrapper))
    async with collector, ChaosStack(tmp_path, settings=settings, program=program) as stack:
        stack.decisions = collected
        await stack.begin()
        async with stack.load() as load:
            await load.more(20)
            os.kill(collector.pid, signal.SIGSTOP)
            await stack.until(lambda: is_stopped(collector.pid))
            before = collected.stat().st_size
            routed = (await stack.state())["counters"]["routed"]
            await load.more(200)
            assert collected.stat().st_size == before
            assert (await stack.state())["counters"]["routed"] >= routed + 150
            os.kill(collector.pid, signal.SIGCONT)
            await load.more(20)
        await stack.expect_unharmed(load)
        assert collected.stat().st_size > before + (100 << 10)
