"""`ray-prefix-affinity`: Ray Serve LLM's PrefixCacheAffinityRouter.

    if longest queue - shortest queue > imbalanced_threshold (infinite by default): two workers by chance
    else if matched characters / characters >= 0.1:  everyone at the node where the match ends
    else:                                            everyone with the smallest tree
    of those the one with the shortest queue, the first where they are equal

The tree is a character tree like that of `string_tree`, learnt when a request is sent; nothing is evicted by
default. The queue is the number of requests under way.

Source: Ray 2.60, `python/ray/llm/_internal/serve/routing_policies/prefix_aware/`. The queue is exact here;
Ray caches the lengths that replicas report.
"""

from extproc.sim.routing import FleetFacts, NullRouter, SimRequest
from loadtests.peers.in_flight import InFlight
from loadtests.peers.string_tree import StringTree

MATCH_RATE_THRESHOLD = 0.1


class RayPrefixAffinity(NullRouter):
    """See the module's docstring."""

    name = "ray-prefix-affinity"
    wants_kv_events = False

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        del seed  # chance plays a part only when load is imbalanced, which by default it never is
        self.in_flight = InFlight(facts.replicas)
        self.tree = StringTree(facts.replicas, facts.engine.block_size)

    def candidates(self, request: SimRequest) -> list[int]:
        """Workers that the tree speaks for."""
        match = self.tree.match(request.prefix)
        if match.blocks * request.block_size / request.prompt_tokens >= MATCH_RATE_THRESHOLD:
            return sorted(match.workers)
        smallest = min(self.tree.sizes)
        return [worker for worker, size in enumerate(self.tree.sizes) if size == smallest]

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        del now
        worker = min(self.candidates(request), key=self.in_flight.counts.__getitem__)
        self.tree.insert(request.prefix, worker)
        self.in_flight.begin(request.request_id, worker)
        return worker

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        del cached_tokens, output_tokens, now
        self.in_flight.end(request_id)
