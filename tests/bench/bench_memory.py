"""What a router keeps after a million distinct prompts: `python -m tests.bench.bench_memory [prompts]`.

Eight workers with caches of 4,000 blocks, half of which tell by KV events what they store and evict; the
index has a ceiling below what they hold together. Every prompt, session and request id is there once. After
the first tenth, when all tables have reached their bounds, memory must stay where it is.
"""

import argparse
import gc
from collections import deque
from itertools import count
from pathlib import Path
from random import Random

from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.hashing import REMEMBERED
from extproc.core.policies.token_load import TokenLoad
from extproc.core.router import Router, RouterSettings
from extproc.core.types import BlockRemoved, BlockStored, Completion, Outcome, WorkerId
from tests.support.core import NAMESPACE, members, metrics, request, worker

BLOCK = 16
CAPACITY = 4_000
CEILING = 20_000
BLOCKS = 8  # of a prompt


class Engine:
    """Stores each prompt it gets, and evicts the least recently stored."""

    def __init__(self, router: Router, who: WorkerId, handles: "count[int]") -> None:
        self.router, self.who, self.handles = router, who, handles
        self.held: deque[int] = deque()

    def serve(self, tokens: list[int], now: float) -> None:
        """Tell of a prompt."""
        names = tuple(next(self.handles) for _ in range(BLOCKS))
        self.held.extend(reversed(names))
        gone = [self.held.popleft() for _ in range(max(0, len(self.held) - CAPACITY))]
        events = [BlockStored(names, None, tokens[: BLOCKS * BLOCK], BLOCK), BlockRemoved(tuple(gone))]
        self.router.on_kv_events(self.who, events, now)


def resident_mb() -> float:
    """Memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def main() -> None:
    """Print memory after each tenth."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.bench_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "prompts", type=int, nargs="?", default=1_000_000, help="how many (default: a million)"
    )
    prompts = max(10, parser.parse_args().prompts)
    ids, handles, rng = count(), count(1), Random(1)
    costs = CostSettings()
    router = Router(
        TokenLoad(costs),
        Random(1),
        new_lease_id=lambda: str(next(ids)),
        pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, BLOCK)},
        costs=costs,
        settings=RouterSettings(max_index_blocks=CEILING),
    )
    router.on_membership(members(8), 0.0)
    engines = {worker(n): Engine(router, worker(n), handles) for n in range(4)}
    print(f"ceiling of the index: {CEILING} blocks; what 8 workers hold: {8 * CAPACITY}")
    for number in range(prompts):
        now = number * 0.01
        if number % 100 == 0:
            for n in range(8):
                router.on_metrics(worker(n).endpoint, {0: metrics(num_gpu_blocks=CAPACITY + 1)}, now)
            router.tick(now)
        tokens = [number, *(rng.randrange(150_000) for _ in range(BLOCKS * BLOCK))]
        asked = request(tokens, request_id=f"request {number}", session_key=f"session {number}")
        decision = router.schedule(asked, now)
        engine = engines.get(decision.chosen.worker)
        if engine is not None:
            engine.serve(tokens, now)
        router.on_first_token(decision.lease_id, now)
        router.release(decision.lease_id, Completion(Outcome.FINISHED, output_tokens=9, cached_tokens=0), now)
        if (number + 1) % (prompts // 10) == 0:
            gc.collect()
            stats = router.index.stats()
            print(
                f"{number + 1:9d} prompts: {resident_mb():6.0f} MiB; index {router.index.entries} blocks, "
                f"{router.index.given_up} given up, {stats.unknown_removes} unknown removals, "
                f"{stats.orphans} orphans; {REMEMBERED.blocks} blocks with known hashes",
                flush=True,
            )


if __name__ == "__main__":
    main()
