"""How fast KV events come in over real sockets, and what a storm of them does to decisions.

`python -m tests.bench.bench_kv_stream`
"""

import asyncio
import random
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import zmq
import zmq.asyncio

from extproc.adapters.kv_publisher import encode_batch
from extproc.adapters.kv_stream import KvSource
from extproc.adapters.kv_subscriber import KvSubscriber
from extproc.adapters.zmq_messages import ZmqMessages
from extproc.core.hashing import prompt_chain, token_array
from extproc.core.kv_index import KvIndex
from extproc.core.namespace import Namespace
from extproc.core.types import BlockRemoved, BlockStored, WorkerId
from extproc.protocol.kv_events import decode
from tests.support.kv_captures import payloads
from tests.support.kv_publisher import VllmPublisher

WORKER = WorkerId("w:1")


def bench_decode() -> None:
    """Decode the recording with many evictions."""
    messages = payloads("evict_bs32")
    events = sum(len(decode(payload).events) for payload in messages)
    size = sum(map(len, messages))
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for payload in messages:
            decode(payload)
        best = min(best, time.perf_counter() - start)
    print(f"decode: {events / best / 1e6:.2f} M events/s, {size / best / 1e6:.0f} MB/s")


async def bench_replay(messages: int) -> None:
    """Replay of that recording, again and again, into an index; socket, decoding and index together."""
    rng = random.Random(1)
    recording = payloads("evict_bs32")
    async with VllmPublisher() as publisher:
        for _ in range(messages):
            publisher.publish(raw=rng.choice(recording), lose=True)
        index = KvIndex()
        index.add_worker(WORKER, "model", "tokenizer")
        seen = 0
        done = asyncio.Event()

        def on_events(worker: WorkerId, events) -> None:
            nonlocal seen
            for event in events:
                index.apply(worker, event)
            seen += 1
            if seen == messages:
                done.set()

        subscriber = KvSubscriber(on_events, index.clear, lambda *_: None, time.monotonic)
        start = time.perf_counter()
        subscriber.set_sources([KvSource(WORKER, publisher.endpoint, publisher.replay_endpoint)])
        await done.wait()
        took = time.perf_counter() - start
        await subscriber.close()
    print(f"replay over a socket: {messages / took:.0f} messages/s (publisher in the same process)")


async def bench_singly(messages: int = 300, rounds: int = 9) -> None:
    """Messages one at a time, as from engines that are not busy: the event loop's processor time for each."""
    context = zmq.asyncio.Context()
    pairs = {}
    for name in ("zmq.asyncio", "ZmqMessages"):
        into = context.socket(zmq.PULL)
        port = into.bind_to_random_port("tcp://127.0.0.1")
        out = zmq.Context.shadow(context.underlying).socket(zmq.PUSH)
        out.connect(f"tcp://127.0.0.1:{port}")
        pairs[name] = (into, out)
    ours = ZmqMessages(zmq.Socket.shadow(pairs["ZmqMessages"][0].underlying), time.monotonic, 0.001)
    ways: dict[str, Callable[[], Awaitable[list[bytes]]]] = {
        "zmq.asyncio": pairs["zmq.asyncio"][0].recv_multipart,
        "ZmqMessages": ours.next,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, receive in ways.items():
            wanted = threading.Semaphore(1)

            def send(out: "zmq.Socket[bytes]" = pairs[name][1], wanted: threading.Semaphore = wanted) -> None:
                for number in range(messages):
                    wanted.acquire()
                    out.send_multipart([b"kv", number.to_bytes(8, "big"), b"payload"])

            sender = threading.Thread(target=send)
            began = time.thread_time()
            sender.start()
            for _ in range(messages):
                await receive()
                wanted.release()
            took[name].append((time.thread_time() - began) / messages * 1e6)
            sender.join()
    theirs, own = (statistics.median(took[name]) for name in ways)
    print(
        f"messages one at a time: zmq.asyncio {theirs:.0f} µs each, ours {own:.0f} µs ({own / theirs:.2f}x)"
    )
    ours.close()
    context.destroy(linger=0)


async def publish_storm(engines: int, messages: int) -> None:
    """Engines with messages to replay, of 16 events of 16 blocks each, until standard input ends."""
    rng = random.Random(1)
    async with AsyncExitStack() as stack:
        for _ in range(engines):
            publisher = await stack.enter_async_context(VllmPublisher())
            for _ in range(messages):
                events, parent = [], None
                for _ in range(16):
                    handles = tuple(rng.getrandbits(63) for _ in range(16))
                    tokens = [rng.randrange(150_000) for _ in range(256)]
                    events.append(BlockStored(handles, parent, tokens, 16))
                    parent = handles[-1]
                publisher.publish(raw=encode_batch(events, timestamp=1.0), lose=True)
            print(publisher.endpoint, publisher.replay_endpoint, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def lateness(until: Callable[[], bool], decide: Callable[[], object]) -> list[float]:
    """How late, in milliseconds, a decision asked for every five is answered."""
    late = []
    due = time.perf_counter() + 0.005
    while not until():
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        decide()
        late.append((time.perf_counter() - due) * 1e3)
        due = max(due + 0.005, time.perf_counter())
    return late


async def burn() -> None:
    """Slices of a millisecond: the best a loop can do that is busy and shares its processor."""
    while True:
        ends = time.perf_counter() + 0.001
        while time.perf_counter() < ends:
            pass
        await asyncio.sleep(0)


async def bench_storm(engines: int = 8, messages: int = 200) -> None:
    """All engines replay at once, from another process, while a prompt of 2,000 blocks is looked up."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name, "publish", str(engines), str(messages),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    lines = [(await child.stdout.readline()).decode().split() for _ in range(engines)]
    workers = [WorkerId(f"w{at}:1") for at in range(engines)]
    index = KvIndex()
    for worker in workers:
        index.add_worker(worker, "model", "tokenizer")
    prompt = prompt_chain(token_array(range(32_001)), 16, Namespace("model", "tokenizer").seed)
    index.apply(workers[0], BlockStored(tuple(range(2000)), None, range(32_000), 16))
    index.apply(workers[0], BlockRemoved(tuple(reversed(range(2000)))))

    def on_events(worker: WorkerId, events) -> None:
        for event in events:
            index.apply(worker, event)

    ends = time.perf_counter() + 3
    quiet = await lateness(lambda: time.perf_counter() > ends, lambda: index.match(prompt))
    burner = asyncio.create_task(burn())
    ends = time.perf_counter() + 3
    beside_slices = await lateness(lambda: time.perf_counter() > ends, lambda: index.match(prompt))
    burner.cancel()
    subscriber = KvSubscriber(on_events, index.clear, lambda *_: None, time.monotonic)
    blocks = engines * messages * 256
    start = time.perf_counter()
    subscriber.set_sources(
        KvSource(worker, *addresses) for worker, addresses in zip(workers, lines, strict=True)
    )
    storm = await lateness(lambda: index.stats().blocks >= blocks, lambda: index.match(prompt))
    took = time.perf_counter() - start
    await subscriber.close()
    child.terminate()
    await child.wait()
    print(f"storm of {blocks} blocks from {engines} engines: {blocks / took / 1e6:.2f} M blocks/s")
    for what, late in (("without", quiet), ("beside slices of 1 ms", beside_slices), ("during it", storm)):
        cuts = statistics.quantiles(late, n=100)
        print(
            f"  decisions {what}: late by p50 {cuts[49]:.1f}, p99 {cuts[98]:.1f}, at most {max(late):.1f} ms"
        )


def main() -> None:
    """Print all figures."""
    if sys.argv[1:2] == ["publish"]:
        asyncio.run(publish_storm(int(sys.argv[2]), int(sys.argv[3])))
        return
    bench_decode()
    asyncio.run(bench_singly())
    asyncio.run(bench_replay(5000))
    asyncio.run(bench_storm())


if __name__ == "__main__":
    main()
