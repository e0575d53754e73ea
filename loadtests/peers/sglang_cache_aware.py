"""`sglang-cache-aware`: sglang-router's default policy.

    if max load - min load > 64 and max load > 1.5 * min load:  the least loaded
    else if matched characters / characters > 0.3:              the worker the match belongs to
    else:                                                       the least loaded

Load is a worker's requests under way. Of equally loaded workers the first in the list is taken: idle workers
all lose to it. The match is the tree's of `string_tree`; it learns every prompt when it is sent. Every 60 s
the tree is cut down to 2^26 characters for each worker.

Source: sglang-router 0.3.2 (`sgl-model-gateway/src/policies/cache_aware.rs`, defaults of
`sglang_router/router_args.py`). Its comments say that a prompt without a match goes to the worker with the
smallest tree; the code, and a run of 0.3.2 against three servers, take the least loaded.
"""

from extproc.sim.routing import FleetFacts, NullRouter, SimRequest
from loadtests.peers.in_flight import InFlight
from loadtests.peers.string_tree import StringTree

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
EVICTION_INTERVAL_S = 60.0
MAX_TREE_SIZE = 2**26


class SglangCacheAware(NullRouter):
    """See the module's docstring."""

    name = "sglang-cache-aware"
    wants_kv_events = False

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        del seed  # nothing in it is left to chance
        self.in_flight = InFlight(facts.replicas)
        self.tree = StringTree(facts.replicas, facts.engine.block_size)
        self._next_eviction = EVICTION_INTERVAL_S

    def imbalanced(self) -> bool:
        """Whether load counts more than caches now."""
        low, high = min(self.in_flight.counts), max(self.in_flight.counts)
        return high - low > BALANCE_ABS_THRESHOLD and high > low * BALANCE_REL_THRESHOLD

    def least_loaded(self) -> int:
        """The first of the least loaded workers."""
        counts = self.in_flight.counts
        return counts.index(min(counts))

    def choose(self, request: SimRequest) -> int:
        """The worker, before anything is booked."""
        if self.imbalanced():
            return self.least_loaded()
        match = self.tree.match(request.prefix)
        share = match.blocks * request.block_size / request.prompt_tokens
        if share > CACHE_THRESHOLD and match.worker is not None:
            return match.worker
        return self.least_loaded()

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        if now >= self._next_eviction:
            self.tree.evict(MAX_TREE_SIZE)
            self._next_eviction = now + EVICTION_INTERVAL_S
        worker = self.choose(request)
        self.tree.insert(request.prefix, worker)
        self.in_flight.begin(request.request_id, worker)
        return worker

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        del cached_tokens, output_tokens, now
        self.in_flight.end(request_id)
