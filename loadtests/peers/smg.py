"""`smg-cache-aware` and `smg-events`: the default policy of SMG, without and with KV events.

Without events, as sglang-router's (see `sglang_cache_aware`), but of equally loaded workers the one that was
sent the fewest requests ever is taken, then the first.

With events (`smg-events`; SMG has them for gRPC workers only):

    if max load - min load > 64 and max load > 1.5 * min load:  the least loaded
    else if any worker holds the first block:                   the longest overlap; then the lower load, then
                                                                the smaller cache, then the last in the list
    else:                                                       the least loaded

Source: smg 1.13.0 (main at 73da68c, August 2026), `model_gateway/src/policies/cache_aware.rs`, defaults of
`bindings/python/src/smg/router_args.py`. Its two triggers on KV usage are off by default. Overlap is counted
here from chained hashes; SMG's index looks up blocks by position, which can claim more after a gap.
"""

from collections.abc import Sequence

from extproc.core.types import KvEvent
from extproc.sim.routing import FleetFacts, SimRequest
from loadtests.peers.exact_index import ExactIndex
from loadtests.peers.sglang_cache_aware import SglangCacheAware


class SmgCacheAware(SglangCacheAware):
    """See the module's docstring."""

    name = "smg-cache-aware"

    def least_loaded(self) -> int:
        """The least loaded worker, then the one that was sent least."""
        load = self.in_flight
        return min(range(len(load.counts)), key=lambda w: (load.counts[w], load.processed[w], w))


class SmgEvents(SmgCacheAware):
    """See the module's docstring."""

    name = "smg-events"
    wants_kv_events = True

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        super().__init__(facts, seed)
        self._index = ExactIndex(facts.replicas)

    def choose(self, request: SimRequest) -> int:
        """The worker, before anything is booked."""
        if self.imbalanced():
            return self.least_loaded()
        workers = range(len(self.in_flight.counts))
        overlap = [self._index.overlap(worker, request.prefix) for worker in workers]
        if not any(overlap):
            return self.least_loaded()
        return max(
            workers,
            key=lambda w: (overlap[w], -self.in_flight.counts[w], -self._index.size(w), w),
        )

    def on_kv_events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """See `FleetRouter`."""
        del now
        self._index.apply(worker, events)
