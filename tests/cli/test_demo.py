import asyncio
import json
import signal
import sys

import aiohttp
import pytest

from extproc.cli import main
from tests.support.envoy import require_envoy
from tests.support.processes import Mark
from tests.support.waiting import until

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(180)]

SMALL = ("--documents", "2", "--questions", "2", "--engines", "2")


@pytest.fixture
def mark():
    require_envoy()
    mark = Mark()
    yield mark
    assert mark.alive() == {}


async def start(mark, *arguments):
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "demo", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=mark.environment,
    )


async def output_of(process):
    try:
        out, err = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
    return out.decode(), err.decode()


async def test_a_small_demo_ends_with_its_table_and_figures(mark, tmp_path):
    figures = tmp_path / "figures.json"
    process = await start(mark, *SMALL, "--json", str(figures))
    out, err = await output_of(process)
    assert (process.returncode, err) == (0, "")
    for words in ("round-robin", "token-load", "time to first token, p95", "failed requests"):
        assert words in out
    report = json.loads(figures.read_text())
    assert list(report) == ["policies", "predicted_vs_actual"]
    assert list(report["policies"]) == ["round-robin", "token-load"]
    for policy in report["policies"].values():
        assert (policy["requests"], policy["failed"]) == (2 * 2 + 6 * 5, 0)
        assert set(policy["ttft_ms"]) == {"p50", "p95", "p99"}
        assert 0 < policy["cached_token_share"] < 1
    audit = report["predicted_vs_actual"]
    assert audit["total"] == 34
    assert audit["exact"] >= 0.9 * audit["total"]


@pytest.mark.parametrize(
    ("moment", "number"), [("engines start", signal.SIGTERM), ("requests run", signal.SIGINT)]
)
async def test_an_interrupt_leaves_nothing_behind(mark, tmp_path, number, moment):
    work = tmp_path / "work"
    process = await start(mark, "--documents", "50", "--engines", "2", "--work-dir", str(work))
    decisions = work / "round-robin" / "decisions.jsonl"
    if moment == "engines start":
        await until(lambda: len(mark.alive()) >= 2, 60)
    else:
        await until(lambda: decisions.exists() and decisions.stat().st_size > 0, 60)
        assert len(mark.alive()) == 5  # the demo, two engines, the router, Envoy
    process.send_signal(number)
    out, err = await output_of(process)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "interrupted" in out


async def test_killed_without_a_word_it_takes_its_children_along(mark, tmp_path):
    process = await start(mark, "--documents", "50", "--engines", "2", "--work-dir", str(tmp_path))
    decisions = tmp_path / "round-robin" / "decisions.jsonl"
    await until(lambda: decisions.exists() and decisions.stat().st_size > 0, 60)
    process.kill()
    await output_of(process)
    await until(lambda: mark.alive() == {}, 10)


async def test_kept_it_runs_until_interrupted_and_says_what_to_try(mark, tmp_path):
    process = await start(mark, *SMALL, "--keep", "--json", "-", "--work-dir", str(tmp_path))
    lines = []
    while not lines or "tail -n 1" not in lines[-1]:
        line = await asyncio.wait_for(process.stderr.readline(), 120)
        assert line
        lines.append(line.decode())
    page = next(line for line in lines if "Status page: " in line).split("Status page: ")[1].strip()
    async with aiohttp.ClientSession() as client, client.get(f"{page}state") as reply:
        assert len((await reply.json())["workers"]) > 1
    tries = [line.strip() for line in lines[-4:]]
    answers = ('"tiny"', '"usage"', "Request try-it -> ", '"selected_worker"')
    for command, words in zip(tries, answers, strict=True):
        shell = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE)
        answer, _ = await asyncio.wait_for(shell.communicate(), 30)
        assert words in answer.decode(), command
    process.send_signal(signal.SIGINT)
    out, _ = await output_of(process)
    assert process.returncode == 130
    assert set(json.loads(out)["policies"]) == {"round-robin", "token-load"}  # alone on standard output


async def test_an_engine_that_does_not_start_is_a_clear_error(mark):
    process = await start(mark, *SMALL, "--engine", "vllm", "--vllm-python", "/bin/false")
    out, err = await output_of(process)
    assert process.returncode == 2
    assert "warmroute demo: the engine ended" in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engines", "0"], "--engines must be at least 1"),
        (["--questions", "-1"], "--questions must be at least 1"),
        (["--json", "/no/such/folder/x.json"], "no such folder"),
        (["--work-dir", "/dev/null"], "--work-dir /dev/null"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(arguments, words, capsys):
    assert main(["demo", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_vllm_it_says_how_to_name_one(monkeypatch, capsys):
    monkeypatch.delenv("WARMROUTE_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo", "--engine", "vllm"]) == 2
    assert "--vllm-python" in capsys.readouterr().err
