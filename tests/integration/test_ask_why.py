"""Through a real Envoy: log, command and server tell alike what happened; the journal decides it again."""

import asyncio
import json

import aiohttp

from extproc.cli import main
from tests.support.full_stack import FullStack, Worker
from tests.support.ports import free_port
from tests.support.sim_engine import SimEngine

DOCUMENT = "The river rises in the hills and runs through three valleys to the sea. " * 12


async def command(capsys, *arguments):
    code = await asyncio.to_thread(main, arguments)
    return code, capsys.readouterr().out


async def test_requests_through_envoy_can_be_asked_about_and_replayed(tmp_path, capsys):
    admin = f"127.0.0.1:{free_port()}"
    journal = tmp_path / "journal"
    more = {"admin": {"listen": admin}, "journal": {"path": str(journal)}, "shadow": ["least-load"]}
    async with SimEngine() as one, SimEngine() as two:
        workers = [Worker(engine.endpoint, engine.kv_events, engine.kv_replay) for engine in (one, two)]
        async with FullStack(tmp_path, workers, settings=more) as stack:
            await stack.until_subscribed(2)
            await stack.until_warm(DOCUMENT)
            replies = [await stack.chat(f"{DOCUMENT} {n}?", stream=n % 2 == 0) for n in range(12)]
            line = await stack.decision(replies[-2].request_id)
            assert line["predicted_cached_tokens"] > 0
            async with (
                aiohttp.ClientSession() as client,
                client.get(f"http://{admin}/explain/{line['request_id']}") as reply,
            ):
                told = await reply.json()
            assert told["decision"] == line
            asked = await command(capsys, "explain", line["request_id"], "--admin", f"http://{admin}")
            looked = await command(capsys, "explain", line["request_id"], "--log", str(stack.decisions))
            assert asked == looked == (0, told["text"])
            assert "exactly as predicted" in told["text"]
            assert f"-> {line['selected_worker']}: warm-" in told["text"]
            _, top = await command(capsys, "top", "--admin", admin, "--once")
            assert line["selected_worker"] in top
            await one.kill()
            await stack.chat(f"{DOCUMENT} and then?")
            decided = len(stack.log_entries())
        code, found = await command(capsys, "replay", str(journal), "--policy", "round-robin", "--json")
    report = json.loads(found)
    assert code == 0
    assert report["exact"] == report["requests"] >= decided
    assert 0 < report["what_if"]["changed"] < report["what_if"]["compared"]
    assert b"river" not in journal.read_bytes()
