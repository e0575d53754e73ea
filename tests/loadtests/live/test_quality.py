import asyncio
import json

import pytest

from loadtests.live.quality import FULL, QUICK, WORKLOADS, play, read_stream
from tests.support.sim_engine import SimEngine


def test_the_full_size_is_the_published_one():
    documents, chats = (FULL.workload(name, seed=1) for name in WORKLOADS)
    assert (documents.requests, len({d.system for d in documents.dialogues})) == (240, 24)
    assert (chats.requests, len(chats.dialogues)) == (144, 24)
    assert FULL.workload("chats", 1) == chats != FULL.workload("chats", 2)


@pytest.mark.parametrize("name", WORKLOADS)
async def test_an_engine_that_holds_everything_caches_all_that_can_be(name):
    seen = []
    workload = QUICK.workload(name, seed=3)
    async with SimEngine(num_gpu_blocks=8192) as engine:
        run = await play(engine.endpoint, "tiny", workload, 2, lambda: seen.append(1))
        assert engine.model.running == 0
    assert run.failures == []
    assert len(seen) == len(run.ttft_ms) == workload.requests
    assert run.cached_share > 0.5
    assert run.ttft(0.5) <= run.ttft(0.95)


async def test_turns_of_all_chats_are_interleaved():
    order = []

    async def handle(reader, writer):
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            turns = len([m for m in body["messages"] if m["role"] == "user"])
            order.append(turns)
            usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
            data = f'data: {{"choices":[{{"delta":{{"content":"x"}}}}],"usage":{json.dumps(usage)}}}\n\n'
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(data)}\r\n\r\n{data}".encode())
            if len(order) == 24:
                writer.close()
                return

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        run = await play(address, "tiny", QUICK.workload("chats", 3), 1, lambda: None)
    assert order == sorted(order)  # every first turn, then every second
    assert run.cached_share == pytest.approx(0.4)


async def test_failures_are_kept_and_end_only_their_dialogue():
    async with SimEngine() as engine:
        engine.faults.status = 503
        workload = QUICK.workload("chats", seed=3)
        run = await play(engine.endpoint, "tiny", workload, 2, lambda: None)
    assert len(run.failures) == len(workload.dialogues)
    assert "HTTP 503" in run.failures[0]
    assert run.cached_share is None
    assert run.ttft(0.5) is None


def test_streams_are_read_whatever_they_leave_out():
    events = [
        '{"choices":[{"delta":{"role":"assistant"}}]}',
        '{"choices":[{"delta":{"content":"a"}}]}',
        '{"choices":[],"usage":{"prompt_tokens":7,"prompt_tokens_details":null}}',
        "[DONE]",
    ]
    body = "".join(f"data: {event}\n\n" for event in events).encode()
    assert read_stream(body) == ("a", 7, 0)
    with pytest.raises(ValueError, match="no usage"):
        read_stream(b"data: [DONE]\n\n")
