"""What the router keeps is bounded by what the engines hold and by the requests in flight."""

import gc
import tracemalloc
from collections import deque

import pytest

from extproc.core import hashing
from extproc.core.prefix_classes import PrefixClasses
from extproc.core.types import BlockRemoved, Completion, Outcome, Tier
from tests.core.test_router import PROMPT, make_router
from tests.support.core import BLOCK, metrics, request, stored, worker

CAPACITY = 64  # blocks an engine holds
BLOCKS = 8  # blocks of a prompt


class Engine:
    """Tells of every block it stores and, least recently stored first, evicts. `None`: tells nothing."""

    def __init__(self, router, who):
        self.router, self.who = router, who
        self.held, self.next = deque(), 1

    def serve(self, tokens):
        handles = tuple(range(self.next, self.next + BLOCKS))
        self.next += BLOCKS
        self.router.on_kv_events(self.who, [stored(tokens, first_handle=handles[0])], 1.0)
        self.held.extend(handles)
        while len(self.held) > CAPACITY:
            self.router.on_kv_events(self.who, [BlockRemoved((self.held.popleft(),))], 1.0)


@pytest.mark.parametrize("events", [True, False], ids=["events", "no events"])
def test_pitfall_50_distinct_prompts_without_end_take_bounded_memory(events, monkeypatch):
    # What would take long to reach its limit has a lower one here.
    monkeypatch.setattr(PrefixClasses.__init__, "__defaults__", (4096,))
    monkeypatch.setattr(hashing.REMEMBERED, "_half", 16)
    router = make_router(2)
    for n in range(2):
        router.on_metrics(worker(n).endpoint, {0: metrics(num_gpu_blocks=CAPACITY)}, 0.5)
    engines = {worker(n): Engine(router, worker(n)) for n in range(2)}
    numbers = iter(range(10**9))

    def traffic(requests):
        for _ in range(requests):
            number = next(numbers)
            tokens = [number + 1, *range(BLOCKS * BLOCK)]
            ask = request(tokens, request_id=f"r{number}", session_key=f"user {number}", stream=True)
            ask.model = f"adapter-{number}"
            decision = router.schedule(ask, 1.0)
            if events:
                engines[decision.chosen.worker].serve(tokens[: BLOCKS * BLOCK])
            router.on_first_token(decision.lease_id, 1.1)
            done = Completion(
                Outcome.FINISHED, output_tokens=20, cached_tokens=0, first_body_ms=9.0, duration_ms=99.0
            )
            router.release(decision.lease_id, done, 1.2)

    tracemalloc.start()
    try:
        traffic(1_500)  # tables that have a limit reach it
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        traffic(1_500)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    stats = router.index.stats()
    if events:
        assert (stats.blocks, stats.reservations) == (2 * CAPACITY, 0)
    else:
        assert stats.blocks == 0
        assert CAPACITY < stats.reservations < 2 * CAPACITY  # answers take room as well
    assert len(router.ledger) == 0
    assert after - before < 75_000  # an entry per request, with its key, would be twice that


def test_pitfall_49_blocks_that_left_the_gpu_for_the_cpu_still_count():
    router = make_router(2)
    handles = tuple(range(1, 1 + len(PROMPT) // BLOCK))
    router.on_metrics(worker(0).endpoint, {0: metrics(num_gpu_blocks=4)}, 0.5)
    router.on_kv_events(
        worker(0),
        [stored(PROMPT), stored(PROMPT, tier=Tier.CPU), BlockRemoved(handles)],
        0.5,
    )
    chosen = router.schedule(request(PROMPT), 1.0).chosen
    assert chosen.worker == worker(0)
    assert (chosen.cached_tokens, chosen.offloaded_tokens) == (0, (len(PROMPT) - 1) // BLOCK * BLOCK)


@pytest.mark.parametrize("events", [True, False], ids=["events", "no events"])
def test_pitfall_51_a_chat_that_begins_below_one_block_is_warm_as_soon_as_it_has_one(events):
    router = make_router(3)
    for n in range(3):
        router.on_metrics(worker(n).endpoint, {0: metrics()}, 0.5)
    history, homes = [], set()
    for turn in range(1, 20):
        history += range(turn * 100, turn * 100 + 7)
        decision = router.schedule(request(history), float(turn))
        served = max(0, len(history) - 7) // BLOCK * BLOCK
        # Without events the block of a prompt's last token is not assumed: no equal prompt could hit it.
        least = served if events else max(0, len(history) - 8) // BLOCK * BLOCK
        assert least <= decision.chosen.cached_tokens <= served
        if len(history) - 7 >= BLOCK:
            homes.add(decision.chosen.worker)
        if events and len(history) >= BLOCK:
            router.on_kv_events(
                decision.chosen.worker, [stored(history, first_handle=turn * 1000)], float(turn)
            )
        done = Completion(Outcome.FINISHED, cached_tokens=decision.chosen.cached_tokens)
        router.release(decision.lease_id, done, turn + 0.5)
    assert len(homes) == 1
