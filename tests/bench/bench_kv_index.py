"""Speed and size of the KV index: `python -m tests.bench.bench_kv_index`.

With `ai-dynamo-runtime` installed, KV events are applied beside its `RadixTree.apply_event`, in turns. Times
are medians of many rounds; where two things take turns, so that whatever else runs on the machine meets both,
their ratio is printed.
"""

import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import repeat
from typing import Any

import msgspec

from extproc.adapters.kv_publisher import encode_batch
from extproc.core.assumed_cache import AssumedCache
from extproc.core.hashing import ChainMemo, chain, prompt_chain, token_array
from extproc.core.kv_index import KvIndex
from extproc.core.kv_transfer import EnginePart
from extproc.core.namespace import Namespace
from extproc.core.prefix_classes import PrefixClasses
from extproc.core.types import BlockRemoved, BlockStored, WorkerId
from extproc.protocol.kv_events import decode

BLOCK = 16
MODEL = ("model", "tokenizer")
SEED = Namespace(*MODEL).seed
ROUNDS = 9


def in_turns(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Median seconds of each run, one round of all after the other."""
    took: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, times in zip(runs, took, strict=True):
            gc.collect()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in took]


def workers(count: int) -> list[WorkerId]:
    """So many."""
    return [WorkerId(f"10.0.0.{at}:8000") for at in range(count)]


def index_of(names: Sequence[WorkerId]) -> KvIndex:
    """An empty index."""
    index = KvIndex()
    for name in names:
        index.add_worker(name, *MODEL)
    return index


def stored(rng: random.Random, blocks: int, per_event: int) -> list[BlockStored]:
    """One prompt of `blocks` blocks as the events of an engine."""
    events: list[BlockStored] = []
    parent = None
    for _ in range(blocks // per_event):
        handles = tuple(rng.getrandbits(63) for _ in range(per_event))
        tokens = [rng.randrange(150_000) for _ in range(per_event * BLOCK)]
        events.append(BlockStored(handles, parent, tokens, BLOCK, extra_keys=(None,) * per_event))
        parent = handles[-1]
    return events


# --- what a decision needs of it ----------------------------------------------------------------------------


class Stages:
    """Prompts of 32,000 tokens, 64 workers: a system prompt of 2,048 tokens on all, sessions on two each."""

    def __init__(self, prompts: int) -> None:
        self.rng = random.Random(1)
        self.names = workers(64)
        self.index = index_of(self.names)
        self.memo, self.classes = ChainMemo(), PrefixClasses()
        self.system = [self.rng.randrange(150_000) for _ in range(2048)]
        self.assumed = AssumedCache(self.index)
        self.took: dict[str, list[float]] = {}
        self.sessions = [self.system + self._text(29_000) for _ in range(prompts)]
        handle = 0
        for at, tokens in enumerate(self.sessions):
            for name in (self.names[at % 64], self.names[(at * 7 + 1) % 64]):
                count = len(tokens) // BLOCK
                handles = tuple(range(handle, handle + count))
                handle += count
                self.index.apply(name, BlockStored(handles, None, tokens, BLOCK))

    def _text(self, tokens: int) -> list[int]:
        return [self.rng.randrange(150_000) for _ in range(tokens)]

    def grown(self, at: int) -> "array[int]":
        """The next turn of a session, which goes on."""
        tokens = self.sessions[at % len(self.sessions)] + self._text(950)
        self.sessions[at % len(self.sessions)] = tokens[:31_000]
        return token_array(tokens)

    def new(self, _: int) -> "array[int]":
        """A prompt that was never seen."""
        return token_array(self._text(32_000))

    def run(
        self, prompt: Callable[[int], "array[int]"], rounds: int, *, events: bool
    ) -> dict[str, list[float]]:
        """Microseconds of each step; without `events` the worker has none, and blocks are assumed."""
        steps = ("hash", "match", "class", "reserve", "release")
        took: dict[str, list[float]] = {step: [] for step in (*steps, "all", "plain")}
        for at in range(rounds):
            tokens, worker, now = prompt(at), self.names[at % 64], float(at)
            times = [time.perf_counter()]
            found = self.memo.prompt_chain(tokens, BLOCK, SEED)
            times.append(time.perf_counter())
            self.index.match(found)
            times.append(time.perf_counter())
            self.classes.observe(("pool",), found, now)
            times.append(time.perf_counter())
            self.index.reserve(worker, found)
            if not events:
                self.assumed.admit(worker, "ticket", 20, 20_000)
            times.append(time.perf_counter())
            self.index.unreserve(worker, found, now)
            if not events:
                self.assumed.done(worker, "ticket")
                self.assumed.record(worker, found, 20_000, now, 20)
            times.append(time.perf_counter())
            for step, start, stop in zip(steps, times, times[1:], strict=False):
                took[step].append((stop - start) * 1e6)
            took["all"].append((times[-1] - times[0]) * 1e6)
            start = time.perf_counter()
            prompt_chain(tokens, BLOCK, SEED)
            took["plain"].append((time.perf_counter() - start) * 1e6)
        return took


def bench_stages(rounds: int = 300) -> None:
    """What the index costs a decision, beside hashing the prompt block by block without any memory."""
    stages = Stages(64)
    for what, prompt in (("growing sessions", stages.grown), ("new prompts", stages.new)):
        for events in (True, False):
            steps = stages.run(prompt, rounds, events=events)
            plain = steps.pop("plain")
            shown = (f"{step} {statistics.median(us):.0f}/{_tenth(us):.0f}" for step, us in steps.items())
            print(
                f"32k tokens, 64 workers, {what}, {'' if events else 'no '}events, us (median/best tenth): "
                f"{', '.join(shown)}; all is {_tenth(steps['all']) / _tenth(plain):.2f} of hashing each block"
            )


def _tenth(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def bench_match(count: int, blocks: int = 2000) -> None:
    """All workers hold a prefix of a random length of one prompt."""
    rng = random.Random(1)
    names = workers(count)
    index = index_of(names)
    events = stored(rng, blocks, 16)
    tokens = token_array(token for event in events for token in event.token_ids)
    hashes = tuple(chain(tokens, BLOCK, SEED))
    for at, name in enumerate(names):
        for event in events[: len(events) if at % 4 == 0 else rng.randrange(1, len(events))]:
            index.apply(name, event)
    index.reserve(names[1], hashes[:1500])
    stranger = [h ^ 1 for h in hashes]
    look = index._states.of.get
    warm, cold, plain = in_turns(
        40,
        lambda: [index.match(hashes) for _ in repeat(None, 10)],
        lambda: [index.match(stranger) for _ in repeat(None, 10)],
        lambda: [list(map(look, hashes)) for _ in repeat(None, 10)],
    )
    print(
        f"match {blocks} blocks, {count:3d} workers with as many lengths: {warm * 1e5:.0f} us, "
        f"{cold * 1e5:.1f} us cold; {warm / plain:.2f} of looking up each block once"
    )


# --- events -------------------------------------------------------------------------------------------------


def bench_apply(per_event: int) -> None:
    """Store, then remove one block per event: the end of a prompt first, as vLLM does, or its beginning."""
    rng = random.Random(2)
    worker = WorkerId("w:1")
    prompts = [stored(rng, 320, per_event) for _ in range(60)]
    stores = [event for prompt in prompts for event in prompt]
    handles = [handle for event in stores for handle in event.block_hashes]
    tail_first = [BlockRemoved((handle,)) for handle in reversed(handles)]
    head_first = [BlockRemoved((handle,)) for handle in handles]
    took: dict[str, list[float]] = {"stored": [], "removed": [], "removed from the middle": []}
    for _ in range(ROUNDS):
        for what, removals in (("removed", tail_first), ("removed from the middle", head_first)):
            index = index_of([worker])
            start = time.perf_counter()
            for event in stores:
                index.apply(worker, event)
            middle = time.perf_counter()
            for removal in removals:
                index.apply(worker, removal)
            took["stored"].append(middle - start)
            took[what].append(time.perf_counter() - middle)
            assert index.entries == 0
    rates = (f"{len(handles) / statistics.median(times) / 1e6:.2f} {what}" for what, times in took.items())
    print(f"apply, {per_event:2d} blocks per event, M blocks/s: {', '.join(rates)}")


class Beside:
    """The same events for Dynamo's tree and for ours: prompts of 320 blocks, 16 blocks an event."""

    def __init__(self, core: Any, prompts: int) -> None:
        rng = random.Random(4)
        self.core = core
        self.worker = WorkerId("w:1")
        self.messages: list[bytes] = []  # as an engine publishes them, with token ids
        self.parts: list[bytes] = []  # ours, with hashes
        self.theirs: list[bytes] = []  # Dynamo's, with hashes
        self.blocks = 0
        for _ in range(prompts):
            seed = SEED
            for event in stored(rng, 320, 16):
                self.messages.append(encode_batch([event], timestamp=1.0))
                ours = chain(token_array(event.token_ids), BLOCK, seed)
                seed = ours[-1]
                part = EnginePart(BLOCK, 0, ((event.parent, 16),), event.block_hashes, tuple(ours), ())
                self.parts.append(msgspec.msgpack.encode(part))
                self.theirs.append(
                    self._theirs(event, core.compute_block_hash_for_seq(event.token_ids, BLOCK))
                )
                self.blocks += 16

    def _theirs(self, event: BlockStored, hashes: Sequence[int]) -> bytes:
        blocks = [
            {"block_hash": handle, "tokens_hash": tokens}
            for handle, tokens in zip(event.block_hashes, hashes, strict=True)
        ]
        data = {"stored": {"parent_hash": event.parent, "blocks": blocks}}
        return json.dumps({"event_id": self.blocks, "data": data, "dp_rank": 0}).encode()

    def ours_from_engine(self) -> None:
        """Decode, hash, apply."""
        index = index_of([self.worker])
        for message in self.messages:
            for event in decode(message).events:
                index.apply(self.worker, event)
        assert index.stats().blocks == self.blocks

    def theirs_from_engine(self) -> None:
        """Decode, hash with Dynamo's own function, write the JSON that it takes, apply."""
        tree, hash_of = self.core.RadixTree(), self.core.compute_block_hash_for_seq
        for message in self.messages:
            for event in decode(message).events:
                assert isinstance(event, BlockStored)
                tree.apply_event(1, self._theirs(event, hash_of(event.token_ids, BLOCK)))
        tree.find_matches([1])

    def ours_with_hashes(self) -> None:
        """Decode and apply."""
        index = index_of([self.worker])
        for part in self.parts:
            index.restore(self.worker, msgspec.msgpack.decode(part, type=EnginePart))
        assert index.stats().blocks == self.blocks

    def theirs_with_hashes(self) -> None:
        """Apply: decoding is in it."""
        tree = self.core.RadixTree()
        for message in self.theirs:
            tree.apply_event(1, message)
        tree.find_matches([1])


def bench_beside_dynamo() -> None:
    """Events of 16 blocks, from bytes to applied."""
    try:
        core = import_module("dynamo._core")
    except ImportError:
        print("events beside Dynamo: not measured, `pip install ai-dynamo-runtime` is missing")
        return
    beside = Beside(core, 100)
    runs = (
        beside.ours_from_engine,
        beside.theirs_from_engine,
        beside.ours_with_hashes,
        beside.theirs_with_hashes,
    )
    ours, theirs, ours_ready, theirs_ready = (beside.blocks / took / 1e6 for took in in_turns(ROUNDS, *runs))
    print(
        f"events of 16 blocks, M blocks/s, from the bytes of an engine (decode, hash, apply): {ours:.2f}, "
        f"Dynamo's {theirs:.2f}: {ours / theirs:.2f} times\n"
        f"from bytes with the hashes ready: {ours_ready:.2f}, Dynamo's {theirs_ready:.2f}: "
        f"{ours_ready / theirs_ready:.2f} times\n"
        f"ours from an engine's bytes, theirs with the hashes ready: {ours / theirs_ready:.2f} times"
    )


# --- size ---------------------------------------------------------------------------------------------------


def bench_memory(blocks: int, holders: int = 1, *, shared: bool = False) -> None:
    """Bytes the index adds for each block and each worker that holds it."""
    rng = random.Random(3)
    names = workers(holders)
    index = index_of(names)
    gc.collect()
    tracemalloc.start()
    done = 0
    while done < blocks * holders:
        # Handles arrive as new objects and stay in the index; tokens do not.
        events = stored(rng, 1600, 16)
        for at, name in enumerate(names if shared else [names[done // 1600 % holders]]):
            for event in events:
                changed = tuple(handle + at for handle in event.block_hashes)
                parent = None if event.parent is None else event.parent + at
                index.apply(
                    name, BlockStored(changed, parent, event.token_ids, BLOCK, extra_keys=event.extra_keys)
                )
            done += 1600
        del events, event, changed
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    which = "the same blocks" if shared else "other blocks each"
    print(
        f"memory, {holders} worker(s), {which}: {used / done:.0f} bytes per block and worker at {done}, "
        f"{used / index.distinct_blocks:.0f} per distinct block (estimate: {index.memory_bytes() / done:.0f})"
    )


def main() -> None:
    """Print all figures."""
    print(f"Python {sys.version.split()[0]}")
    bench_stages()
    for count in (8, 64):
        bench_match(count)
    tokens = token_array(random.Random(5).randrange(150_000) for _ in range(32_001))
    memo = ChainMemo()
    known, new = in_turns(
        100, lambda: memo.prompt_chain(tokens, BLOCK, SEED), lambda: prompt_chain(tokens, BLOCK, SEED)
    )
    print(
        f"hash 2000 blocks: {new * 1e6:.0f} us, known before: {known * 1e6:.0f} us: {new / known:.1f} times"
    )
    for per_event in (1, 16):
        bench_apply(per_event)
    bench_beside_dynamo()
    for blocks in (100_000, 150_000, 300_000):
        bench_memory(blocks)
    bench_memory(20_000, holders=8)
    bench_memory(20_000, holders=8, shared=True)


if __name__ == "__main__":
    main()
