import asyncio
import json

import pytest

from extproc.cli import main
from extproc.core.types import Outcome
from tests.support.ports import free_port
from tests.support.watched import Watched


async def run(*arguments):
    """The command in a thread, while the server lives in this one's event loop."""
    return await asyncio.to_thread(main, ["explain", *arguments])


async def test_the_server_and_the_log_tell_the_same(tmp_path, capsys):
    async with Watched(tmp_path) as watched:
        watched.warm(1, range(1, 321))
        watched.ask("one")
        assert await run("one", "--admin", watched.url) == 0
        asked = capsys.readouterr().out
        assert await run("one", "--log", str(watched.file)) == 0
        assert capsys.readouterr().out == asked
    assert asked.startswith("Request one -> 10.0.0.1:8000: warm-partial")
    assert "predicted to be cheapest" in asked
    assert "exactly as predicted" in asked


async def test_a_request_that_is_not_over_is_told_of_by_the_server(tmp_path, capsys):
    async with Watched(tmp_path) as watched:
        watched.route("running")
        assert await run("running", "--admin", watched.url) == 0
    assert "It is not over yet." in capsys.readouterr().out


async def test_json_is_the_line(tmp_path, capsys):
    async with Watched(tmp_path) as watched:
        watched.ask("one")
        assert await run("one", "--json", "--admin", watched.url) == 0
        assert json.loads(capsys.readouterr().out) == watched.lines()[0]


async def test_all_candidates_are_listed_on_demand(tmp_path, capsys):
    async with Watched(tmp_path, workers=20) as watched:
        watched.ask("one")
        await run("one", "--log", str(watched.file))
        assert "... and 8 more" in capsys.readouterr().out
        await run("one", "--all", "--log", str(watched.file))
        assert capsys.readouterr().out.count("10.0.0.") >= 20


async def test_of_several_lines_the_last_is_told_and_it_is_said(tmp_path, capsys):
    async with Watched(tmp_path) as watched:
        watched.end(watched.route("twice"), Outcome.FAILED)
        watched.ask("twice")
        assert await run("twice", "--log", str(watched.file)) == 0
    captured = capsys.readouterr()
    assert "2 lines" in captured.err
    assert "It finished" in captured.out


@pytest.mark.parametrize("source", ["--log", "--admin"])
async def test_an_unknown_request_is_exit_1_and_says_where_it_was_looked_for(tmp_path, capsys, source):
    async with Watched(tmp_path) as watched:
        watched.ask("one")
        where = str(watched.file) if source == "--log" else watched.url
        assert await run("nobody", source, where) == 1
    captured = capsys.readouterr()
    assert where in captured.err
    assert captured.out == ""


def test_nobody_there_is_exit_2(capsys):
    assert main(["explain", "x", "--admin", f"http://127.0.0.1:{free_port()}"]) == 2
    assert "warmroute serve" in capsys.readouterr().err


def test_a_log_that_is_not_there_is_exit_2(tmp_path, capsys):
    assert main(["explain", "x", "--log", str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
