"""What a decision costs, by stage, beside NVIDIA Dynamo's: `python -m tests.bench.bench_decision`.

Both are in this process, know the same prefixes on the same workers (told by KV events), have as many
requests in flight, and are asked about the same prompts in turn: first one, then the other, freed after each.
Token ids are given, each in the form that its caller has at hand: an array of 32-bit numbers here, a list of
numbers there. Dynamo's is `select_and_reserve` of its `SelectionService`, awaited on a running loop; without
the package (`pip install 'warmroute[peers]'`) ours runs alone.

Workloads:

* `growing`: turns of sessions. 95 % of each prompt is the session's history, which its worker holds.
* `new`: prompts that share nothing with anything.

Stages: `hash` the prompt's blocks; `match` them; `price` candidates; `order` them; `book` the choice.
"""

import argparse
import asyncio
import gc
import itertools
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from importlib import import_module
from random import Random
from typing import Any, NamedTuple

import zmq

from extproc.adapters.kv_publisher import encode_batch
from extproc.core.candidates import PoolFacts, prompt_hashes
from extproc.core.cost import CostSettings
from extproc.core.namespace import Namespace
from extproc.core.policies.token_load import TokenLoad
from extproc.core.router import Router
from extproc.core.types import (
    BlockStored,
    Candidate,
    Completion,
    EngineMetrics,
    Member,
    Outcome,
    Reason,
    RoutingRequest,
    TokenIds,
    WorkerId,
)

BLOCK = 16
REPEATED = 0.95
SESSIONS = 24
IN_FLIGHT = 4  # requests per worker
IN_FLIGHT_TOKENS = 1024
KV_BLOCKS = 50_000
STAGES = ("hash", "match", "price", "order", "book")
_NAMESPACE = Namespace("model", "tokenizer")
_CANCELLED = Completion(Outcome.CANCELLED)
clock = time.perf_counter


class Timed(TokenLoad):
    """Notes when it is asked and when it has answered."""

    began = ended = 0.0

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See `TokenLoad`."""
        self.began = clock()
        answer = super().order(request, candidates, rng)
        self.ended = clock()
        return answer


class Ours:
    """The router, and the time each stage of its last decision took."""

    def __init__(self, workers: int) -> None:
        costs = CostSettings()
        ids = itertools.count()
        self._policy = Timed(costs)
        self._hashing = 0.0
        self.router = Router(
            self._policy,
            Random(1),
            new_lease_id=lambda: f"lease-{next(ids)}",
            pools={"default": PoolFacts(_NAMESPACE.model_revision, _NAMESPACE.tokenizer_revision, BLOCK)},
            costs=costs,
            prompt_hashes=self._hashes,
        )
        self.workers = [WorkerId(f"10.0.{at >> 8}.{at & 255}:8000") for at in range(workers)]
        self.router.on_membership([Member(worker.endpoint) for worker in self.workers], time.monotonic())
        self.scrape()
        self.stages: dict[str, list[float]] = {stage: [] for stage in STAGES}

    def _hashes(self, request: RoutingRequest, size: int) -> tuple[tuple[int, ...], ...]:
        began = clock()
        found = prompt_hashes(request, size)
        self._hashing += clock() - began
        return found

    def scrape(self) -> None:
        """Metrics of all workers."""
        page = EngineMetrics(running=IN_FLIGHT, waiting=0, block_size=BLOCK, num_gpu_blocks=KV_BLOCKS)
        for worker in self.workers:
            self.router.on_metrics(worker.endpoint, {0: page}, time.monotonic())

    def store(self, at: int, event: BlockStored) -> None:
        """A KV event of a worker."""
        self.router.on_kv_events(self.workers[at], [event], time.monotonic())

    def ask(self, prompt: TokenIds, number: int) -> tuple[str, float]:
        """The lease of one decision, and the seconds it took."""
        request = RoutingRequest(
            request_id=str(number),
            model="model",
            pool="default",
            namespace=_NAMESPACE,
            prompts=(prompt,),
            prompt_tokens=len(prompt),
            stream=True,
        )
        self._hashing = 0.0
        marks: list[float] = []
        began = clock()
        decision = self.router.schedule(request, time.monotonic(), lambda _: marks.append(clock()))
        ended = clock()
        matched = marks[0]
        for stage, taken in zip(
            STAGES,
            (
                self._hashing,
                matched - began - self._hashing,
                self._policy.began - matched,
                self._policy.ended - self._policy.began,
                ended - self._policy.ended,
            ),
            strict=True,
        ):
            self.stages[stage].append(taken)
        return decision.lease_id, ended - began

    def free(self, lease: str) -> float:
        """End a request; the seconds it took."""
        began = clock()
        self.router.release(lease, _CANCELLED, time.monotonic())
        return clock() - began


class Dynamo:
    """The selection service, with one KV event publisher per worker."""

    def __init__(self, workers: int) -> None:
        core: Any = import_module("dynamo._core")
        self._service = core.SelectionService(indexer_threads=1)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._sockets: list[zmq.SyncSocket] = []
        self._sequences = [0] * workers
        self._workers = workers

    async def begin(self) -> None:
        """Register the workers, and wait until each one's events are listened to."""
        for worker in range(self._workers):
            socket = self._context.socket(zmq.XPUB)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            self._sockets.append(socket)
            await self._service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": "model",
                    "endpoint": f"http://worker-{worker}",
                    "block_size": BLOCK,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port}"},
                    "total_kv_blocks": KV_BLOCKS,
                    "max_num_batched_tokens": 8192,
                }
            )
            if not socket.poll(30_000):
                raise TimeoutError("dynamo's KV event listener did not subscribe")
            socket.recv()

    def store(self, at: int, event: BlockStored) -> None:
        """A KV event of a worker."""
        sequence = self._sequences[at].to_bytes(8, "big")
        self._sequences[at] += 1
        self._sockets[at].send_multipart([b"", sequence, encode_batch([event], 0.0)])

    async def knows(self, at: int, tokens: list[int]) -> None:
        """Wait until the worker is known to hold a prompt."""
        deadline = time.monotonic() + 60.0
        while True:
            scores = await self._service.overlap_scores({"model_name": "model", "token_ids": tokens})
            held = {row["worker_id"]: row["device_blocks"] for row in scores["workers"]}
            if held.get(at, 0) >= len(tokens) // BLOCK - 1:
                return
            if time.monotonic() > deadline:
                raise TimeoutError("dynamo's indexer did not apply an event")
            await asyncio.sleep(0.01)

    async def ask(self, tokens: list[int], number: int) -> float:
        """Seconds of one selection."""
        ask = {"selection_id": str(number), "model_name": "model", "token_ids": tokens}
        began = clock()
        await self._service.select_and_reserve(ask)
        return clock() - began

    async def first_token(self, number: int) -> None:
        """Its prefill is over."""
        await self._service.prefill_complete(str(number))

    async def free(self, number: int) -> float:
        """End a request; the seconds it took."""
        began = clock()
        await self._service.free_reservation(str(number))
        return clock() - began

    def close(self) -> None:
        """Stop it."""
        self._service.shutdown()
        for socket in self._sockets:
            socket.close()
        self._context.term()


class Row(NamedTuple):
    """Times of one workload, seconds."""

    ours: list[float]
    freed: list[float]
    dynamo: list[float]
    dynamo_freed: list[float]


def tokens_of(rng: Random, count: int) -> TokenIds:
    """A prompt that has never been."""
    return array("I", rng.randbytes(4 * count)) if count else array("I")


def events_of(history: TokenIds, handles: Iterator[int]) -> Iterator[BlockStored]:
    """A history as an engine tells of it."""
    parent = None
    step = 64 * BLOCK
    for start in range(0, len(history), step):
        part = history[start : start + step]
        mine = tuple(next(handles) for _ in range(len(part) // BLOCK))
        if mine:
            yield BlockStored(mine, parent, list(part[: len(mine) * BLOCK]), BLOCK)
            parent = mine[-1]


async def measure(
    ours: Ours, dynamo: Dynamo | None, histories: list[TokenIds], length: int, rounds: int, rng: Random
) -> dict[str, Row]:
    """Ask both about prompts of both workloads, in turn."""
    rows = {name: Row([], [], [], []) for name in ("growing", "new")}
    numbers = itertools.count(1_000_000)
    for at in range(rounds):
        history = histories[at % len(histories)]
        prompts = {
            "growing": history + tokens_of(rng, length - len(history)),
            "new": tokens_of(rng, length),
        }
        for name, prompt in prompts.items():
            number = next(numbers)
            as_list = prompt.tolist()
            gc.collect(0)
            lease, taken = ours.ask(prompt, number)
            rows[name].ours.append(taken)
            rows[name].freed.append(ours.free(lease))
            if dynamo is not None:
                rows[name].dynamo.append(await dynamo.ask(as_list, number))
                rows[name].dynamo_freed.append(await dynamo.free(number))
        if at % 50 == 0:
            ours.scrape()
    return rows


async def fleet(workers: int, lengths: list[int], rounds: int, *, beside: bool) -> dict[int, float]:
    """Print a table for so many workers; medians of ours on growing sessions, by length."""
    rng = Random(workers)
    ours, dynamo = Ours(workers), None
    if beside:
        dynamo = Dynamo(workers)
        await dynamo.begin()
    handles = itertools.count(1)
    for number in range(IN_FLIGHT * workers):
        prompt = tokens_of(rng, IN_FLIGHT_TOKENS)
        lease, _ = ours.ask(prompt, number)
        if dynamo is not None:
            await dynamo.ask(prompt.tolist(), number)
        if number % 8:
            ours.router.on_first_token(lease, time.monotonic())
            if dynamo is not None:
                await dynamo.first_token(number)
    medians = {}
    for length in lengths:
        histories = [tokens_of(rng, int(length * REPEATED) // BLOCK * BLOCK) for _ in range(SESSIONS)]
        for at, history in enumerate(histories):
            for event in events_of(history, handles):
                ours.store(at % workers, event)
                if dynamo is not None:
                    dynamo.store(at % workers, event)
        if dynamo is not None:
            for at, history in enumerate(histories):
                await dynamo.knows(at % workers, history.tolist())
        ours.scrape()
        await measure(ours, dynamo, histories, length, 5, rng)
        for taken in ours.stages.values():
            taken.clear()
        rows = await measure(ours, dynamo, histories, length, rounds, rng)
        for offset, (name, row) in enumerate(rows.items()):
            report(workers, length, name, row, {s: taken[offset::2] for s, taken in ours.stages.items()})
        medians[length] = statistics.median(rows["growing"].ours)
    if dynamo is not None:
        dynamo.close()
    return medians


def report(workers: int, length: int, name: str, row: Row, stages: dict[str, list[float]]) -> None:
    """One line."""
    parts = " ".join(f"{stage} {us(statistics.median(taken)):5.0f}" for stage, taken in stages.items())
    line = (
        f"{workers:4d} workers {length:7,d} tokens {name:8s} p50 {us(p(row.ours, 0.5)):6.0f} "
        f"p95 {us(p(row.ours, 0.95)):6.0f} us ({parts}) free {us(p(row.freed, 0.5)):5.0f}"
    )
    if row.dynamo:
        ratio = p(row.ours, 0.5) / p(row.dynamo, 0.5)
        both = (p(row.ours, 0.5) + p(row.freed, 0.5)) / (p(row.dynamo, 0.5) + p(row.dynamo_freed, 0.5))
        line += (
            f" | dynamo p50 {us(p(row.dynamo, 0.5)):6.0f} p95 {us(p(row.dynamo, 0.95)):6.0f} "
            f"free {us(p(row.dynamo_freed, 0.5)):4.0f} | ratio {ratio:.2f}, with free {both:.2f}"
        )
    print(line, flush=True)


def p(times: list[float], share: float) -> float:
    """A quantile."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def us(seconds: float) -> float:
    """Microseconds."""
    return seconds * 1e6


def numbers(text: str) -> list[int]:
    """Of a list such as `8,64`."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description="What a decision costs, by stage, beside Dynamo's.")
    parser.add_argument("--workers", type=numbers, default=[8, 64, 512])
    parser.add_argument("--tokens", type=numbers, default=[2048, 32_768, 131_072])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--alone", action="store_true", help="without Dynamo")
    parser.add_argument(
        "--cpu", action="store_true", help="processor time instead: of this thread, so ours alone"
    )
    given = parser.parse_args()
    if given.cpu:
        global clock  # noqa: PLW0603 - a script's one switch
        clock = time.thread_time
    print(f"Python {sys.version.split()[0]}; blocks of {BLOCK}; {IN_FLIGHT} requests in flight per worker")
    beside = not (given.alone or given.cpu)
    if beside:
        try:
            import_module("dynamo._core")
        except ImportError:
            print("dynamo is not installed: ours alone")
            beside = False
    medians = {
        workers: asyncio.run(fleet(workers, given.tokens, given.rounds, beside=beside))
        for workers in given.workers
    }
    least, most = min(given.workers), max(given.workers)
    for length in given.tokens:
        growth = medians[most][length] / medians[least][length]
        print(f"{length:7,d} tokens, growing: {most} workers take {growth:.2f} times what {least} take")


if __name__ == "__main__":
    main()
