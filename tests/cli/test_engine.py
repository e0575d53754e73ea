import argparse
import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio

from extproc.cli import engine, main
from extproc.sim.time_model import PRESETS


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    engine.configure(parser)
    return parser.parse_args(arguments)


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "engine", "--speed", "instant", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, (await process.communicate())[1].decode()
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_engine_says_where_it_is_serves_and_stops_cleanly(number: signal.Signals) -> None:
    async with running("--block-size", "32", "--lora", "sql", "--served-model-name", "m", "n") as (
        process,
        ready,
    ):
        assert (ready["ready"], ready["host"], ready["model"]) == (True, "127.0.0.1", "m")
        url = f"http://127.0.0.1:{ready['port']}"
        body = {"model": "sql", "prompt": list(range(100)), "max_tokens": 3}
        async with aiohttp.ClientSession() as session:
            for cached in (0, 96):
                async with session.post(f"{url}/v1/completions", json=body) as reply:
                    assert reply.status == 200
                    usage = (await reply.json())["usage"]
                    assert usage["prompt_tokens_details"]["cached_tokens"] == cached
            async with session.get(f"{url}/metrics") as reply:
                assert 'block_size="32"' in await reply.text()
            # A stream that is open does not keep the engine from stopping.
            body = {"prompt": "Hello", "stream": True, "max_tokens": 10000, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                await reply.content.readany()
                process.send_signal(number)
                assert await asyncio.wait_for(process.wait(), 20) == 0
        assert process.stderr is not None
        assert await process.stderr.read() == b""


async def test_events_can_be_replayed_from_the_printed_endpoint() -> None:
    context = zmq.asyncio.Context()
    async with running("--kv-topic", "kv@x") as (_, ready), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{ready['port']}/v1/completions"
        async with session.post(url, json={"prompt": list(range(100)), "max_tokens": 1}) as reply:
            assert reply.status == 200
        with context.socket(zmq.DEALER) as socket:
            socket.connect(ready["kv_replay"])
            await socket.send_multipart([b"", (0).to_bytes(8, "big")])
            frames = await asyncio.wait_for(socket.recv_multipart(), 10)
        assert frames[:3] == [b"", b"kv@x", (0).to_bytes(8, "big")]
    context.term()


async def test_it_may_ask_for_a_key() -> None:
    async with running("--api-key", "one", "two") as (_, ready), aiohttp.ClientSession() as session:
        assert not {"one", "two"} & set(map(str, ready.values()))
        url = f"http://127.0.0.1:{ready['port']}/v1/models"
        for key, status in (("three", 401), ("one", 200), ("two", 200)):
            async with session.get(url, headers={"Authorization": f"Bearer {key}"}) as reply:
                assert reply.status == status


async def test_without_events_it_says_so() -> None:
    async with running("--no-kv-events") as (_, ready):
        assert (ready["kv_events"], ready["kv_replay"]) == (None, None)


def test_speeds_start_from_a_set_and_can_be_overridden() -> None:
    assert engine.engine_config(options()).time == PRESETS["medium"]
    time = engine.engine_config(
        options("--speed", "large", "--prefill-tokens-per-s", "4000", "--step-ms", "2.5")
    ).time
    assert (time.prefill_ms_per_token, time.base_ms) == (0.25, 2.5)
    assert time.context_ms_per_token == PRESETS["large"].context_ms_per_token


def test_the_longest_request_is_what_the_blocks_hold() -> None:
    assert engine.engine_config(options()).max_model_len == 16384
    assert engine.engine_config(options("--num-gpu-blocks", "65", "--block-size", "32")).max_model_len == 2048
    assert engine.engine_config(options("--max-model-len", "77")).max_model_len == 77


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--num-gpu-blocks", "10", "--max-model-len", "500"], "raise num_gpu_blocks or lower max_model_len"),
        (["--step-ms", "-1"], "base_ms is -1.0"),
        (["--lora", "tiny"], "'tiny' is both a model and a LoRA adapter"),
        (["--model-dir", "/nowhere"], "/nowhere"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--port", "70000"], ["--block-size", "0"], ["--prefill-tokens-per-s", "0"], ["--speed", "x"]],
)
def test_a_value_out_of_range_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["engine", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
