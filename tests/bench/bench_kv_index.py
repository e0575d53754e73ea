"""Speed and size of the KV index: `python -m tests.bench.bench_kv_index`."""

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable

from extproc.core.hashing import chain, token_array
from extproc.core.kv_index import KvIndex
from extproc.core.namespace import Namespace
from extproc.core.types import BlockRemoved, BlockStored, WorkerId

BLOCK = 16
MODEL = ("model", "tokenizer")


def fastest(run: Callable[[], object], repeat: int) -> float:
    """Best of `repeat`, in seconds."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def stored(rng: random.Random, blocks: int, per_event: int) -> list[BlockStored]:
    """One prompt of `blocks` blocks as the events of an engine."""
    events: list[BlockStored] = []
    parent = None
    for _ in range(blocks // per_event):
        handles = tuple(rng.getrandbits(64) for _ in range(per_event))
        tokens = [rng.randrange(150_000) for _ in range(per_event * BLOCK)]
        events.append(BlockStored(handles, parent, tokens, BLOCK, extra_keys=(None,) * per_event))
        parent = handles[-1]
    return events


def bench_match(workers: int, blocks: int = 2000) -> None:
    """All workers hold a shared prefix of a random length of one prompt, every other worker twice."""
    rng = random.Random(1)
    index = KvIndex()
    events = stored(rng, blocks, 16)
    tokens = token_array(token for event in events for token in event.token_ids)
    hashes = chain(tokens, BLOCK, Namespace(*MODEL).seed)
    for at in range(workers):
        worker = WorkerId(f"10.0.0.{at}:8000")
        index.add_worker(worker, *MODEL)
        for event in events[: len(events) if at % 4 == 0 else rng.randrange(1, len(events))]:
            index.apply(worker, event)
    index.reserve(WorkerId("10.0.0.1:8000"), hashes[:1500])
    warm = fastest(lambda: index.match(hashes), 300)
    stranger = [h ^ 1 for h in hashes]
    cold = fastest(lambda: index.match(stranger), 300)
    print(f"match {blocks} blocks, {workers:3d} workers: {warm * 1e6:7.1f} us warm, {cold * 1e6:.1f} us cold")


def bench_apply(per_event: int) -> None:
    """Store, then remove one block per event, as vLLM does."""
    rng = random.Random(2)
    worker = WorkerId("w:1")
    prompts = [stored(rng, 320, per_event) for _ in range(60)]
    count = sum(len(event.block_hashes) for prompt in prompts for event in prompt)
    stores = [event for prompt in prompts for event in prompt]
    removes = [BlockRemoved((handle,)) for event in stores for handle in event.block_hashes]

    best_store = best_remove = float("inf")
    for _ in range(5):
        index = KvIndex()
        index.add_worker(worker, *MODEL)
        start = time.perf_counter()
        for event in stores:
            index.apply(worker, event)
        middle = time.perf_counter()
        for removal in removes:
            index.apply(worker, removal)
        best_store = min(best_store, middle - start)
        best_remove = min(best_remove, time.perf_counter() - middle)
        assert index.stats().blocks == 0
    print(
        f"apply, {per_event:2d} blocks per event: {count / best_store / 1e6:.2f} M blocks/s stored, "
        f"{count / best_remove / 1e6:.2f} M blocks/s removed"
    )


def bench_memory(blocks: int, workers: int = 1) -> None:
    """Bytes the index adds per block and worker, all blocks distinct."""
    rng = random.Random(3)
    index = KvIndex()
    names = [WorkerId(f"w{at}:1") for at in range(workers)]
    for name in names:
        index.add_worker(name, *MODEL)
    gc.collect()
    tracemalloc.start()
    done = 0
    while done < blocks * workers:
        # Handles arrive as new objects and stay in the index; tokens do not.
        events = stored(rng, 1600, 16)
        for event in events:
            index.apply(names[(done // 1600) % workers], event)
        done += 1600
        del events, event
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"memory, {workers} worker(s): {used / done:.0f} bytes per block at {done} blocks")


def main() -> None:
    """Print all figures."""
    print(f"Python {sys.version.split()[0]}")
    for workers in (8, 64):
        bench_match(workers)
    for per_event in (1, 16):
        bench_apply(per_event)
    for blocks in (100_000, 150_000, 300_000):
        bench_memory(blocks)
    bench_memory(20_000, workers=8)


if __name__ == "__main__":
    main()
