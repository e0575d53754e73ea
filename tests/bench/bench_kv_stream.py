"""How fast KV events come in over real sockets: `python -m tests.bench.bench_kv_stream`."""

import asyncio
import random
import time

from extproc.adapters.kv_subscriber import KvSource, KvSubscriber
from extproc.core.kv_index import KvIndex
from extproc.core.types import WorkerId
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


def main() -> None:
    """Print all figures."""
    bench_decode()
    asyncio.run(bench_replay(5000))


if __name__ == "__main__":
    main()
