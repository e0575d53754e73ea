import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from extproc.adapters.child_process import ChildError, ChildProcess, tied
from tests.support.waiting import until

SLEEP = [sys.executable, "-c", "print('started', flush=True); import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('started', flush=True); time.sleep(600)"
    ),
]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_child_runs_logs_and_ends_when_asked(tmp_path):
    child = ChildProcess(SLEEP, tmp_path / "log")
    assert child.pid is None
    assert not child.running
    await child.start()
    await until(lambda: "started" in child.log_tail())
    assert child.running
    assert await child.stop() == -signal.SIGTERM
    assert not child.running
    assert await child.stop() == -signal.SIGTERM


async def test_a_child_that_ignores_the_request_is_killed(tmp_path):
    async with ChildProcess(STUBBORN, tmp_path / "log") as child:
        await until(lambda: "started" in child.log_tail())
        assert await child.stop(grace=0.05) == -signal.SIGKILL


async def test_leaving_the_context_ends_the_child(tmp_path):
    async with ChildProcess(SLEEP, tmp_path / "log") as child:
        pid = child.pid
        assert alive(pid)
    assert not alive(pid)


async def test_starting_twice_is_refused(tmp_path):
    async with ChildProcess(SLEEP, tmp_path / "log") as child:
        with pytest.raises(ChildError, match="running already"):
            await child.start()


async def test_environment_directory_and_exit_code_are_the_childs(tmp_path):
    program = "import os, sys; print(os.environ['COLOUR'], os.getcwd()); sys.exit(7)"
    environment = {**os.environ, "COLOUR": "green"}
    child = ChildProcess([sys.executable, "-c", program], tmp_path / "log", env=environment, cwd=tmp_path)
    await child.start()
    await until(lambda: not child.running)
    assert child.returncode == 7
    assert child.log_tail() == f"green {tmp_path}"


async def test_a_program_that_does_not_exist_is_named_in_the_log(tmp_path):
    child = ChildProcess(["/nowhere/program"], tmp_path / "log")
    await child.start()
    await until(lambda: not child.running)
    assert child.returncode == 1
    assert "cannot run /nowhere/program" in child.log_tail()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_no_orphan_remains_when_the_parent_is_killed(tmp_path):
    parent_program = (
        "import subprocess, sys, time\n"
        "from extproc.adapters.child_process import tied\n"
        f"child = subprocess.Popen(tied({STUBBORN!r}), stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent_program, stdout=asyncio.subprocess.PIPE
    )
    pid = int(await parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(pid), what="the child dies with its parent")


async def test_a_child_whose_parent_is_gone_already_does_not_start():
    command = tied([sys.executable, "-c", "print('ran')"])
    command[command.index(str(os.getpid()))] = "1"
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert (output, process.returncode) == (b"", 1)
