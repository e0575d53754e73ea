import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys

import pytest

from extproc.cli import main
from tests.support.core import worker
from tests.support.ports import free_port
from tests.support.watched import Watched

WORD = "word"


async def run(*arguments):
    return await asyncio.to_thread(main, ["top", *arguments])


async def test_without_a_terminal_it_prints_once(tmp_path, capsys):
    async with Watched(tmp_path) as watched:
        watched.warm(1, range(1, 321))
        for number in range(3):
            watched.ask(f"request-{number}")
        assert await run("--admin", watched.url) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "3 routed" in out
    for word in ("token-load", "Recent decisions", "Hottest prefixes", worker(2).endpoint, "warm-partial"):
        assert word in out


async def test_a_token_can_be_given(tmp_path, capsys):
    (tmp_path / "token").write_text(WORD)
    async with Watched(tmp_path, token=WORD) as watched:
        assert await run("--admin", watched.url) == 2
        assert "--token-file" in capsys.readouterr().err
        assert await run("--admin", watched.url, "--token-file", str(tmp_path / "token")) == 0


def test_nobody_there_is_exit_2(capsys):
    assert main(["top", "--admin", f"http://127.0.0.1:{free_port()}"]) == 2
    assert "warmroute serve" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "x", "1e9"])
def test_an_interval_that_makes_no_sense_is_refused(interval):
    with pytest.raises(SystemExit) as refused:
        main(["top", "--interval", interval])
    assert refused.value.code == 2


async def test_in_a_terminal_it_follows_until_it_is_interrupted(tmp_path):
    async with Watched(tmp_path) as watched:
        watched.ask("before")
        ours, theirs = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "extproc", "top", "--admin", watched.url, "--interval", "0.1",
            stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "60"},
        )  # fmt: skip
        os.close(theirs)
        seen = b""

        async def until(word):
            nonlocal seen
            loop = asyncio.get_running_loop()
            while word not in seen:
                seen += await asyncio.wait_for(loop.run_in_executor(None, os.read, ours, 65536), 30)

        await until(b"before")
        watched.ask("afterwards")
        await until(b"afterwards")
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while await asyncio.get_running_loop().run_in_executor(None, os.read, ours, 65536):
                pass
        assert await asyncio.wait_for(process.wait(), 30) == 130
        os.close(ours)
