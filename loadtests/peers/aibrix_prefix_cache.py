"""`aibrix-prefix-cache`: AIBrix's prefix-cache routing, without its KV event sync.

    if max running - min running > 8:  only the least running workers can match
    among workers that match: the highest match %, then the fewest running, then chance; the first of them
        with running <= mean + 1 * standard deviation (of the sample, over all workers)
    if there is none: the fewest running of all workers, ties by chance

Running is the gateway's own count of requests under way. The match comes from one table of hashed blocks of
4 characters, each with the workers it was sent to; a worker's match is its unbroken run from the beginning,
in whole percent. A prompt is recorded for the worker it is sent to. The table holds 200,000 blocks in all,
least recently sent dropped first, and forgets a block 20 minutes after it was last sent.

Mapping. A token is 4 characters, so 4 characters are one token and the table holds 200,000 tokens: as many
of the engine's blocks as that is. Percent are of the prompt's tokens.

Source: AIBrix main at e3e10f9 (August 2026), `pkg/plugins/gateway/algorithms/prefix_cache.go`,
`pkg/utils/prefixcacheindexer/hash.go`; the tokenizer is `character` by default.
"""

from collections import OrderedDict
from random import Random
from statistics import fmean, stdev

from extproc.sim.routing import FleetFacts, NullRouter, SimRequest
from loadtests.peers.in_flight import InFlight

IMBALANCE_ABS_COUNT = 8
DEVIATION_FACTOR = 1
TABLE_TOKENS = 200_000
FORGET_AFTER_S = 20 * 60.0


class AibrixPrefixCache(NullRouter):
    """See the module's docstring."""

    name = "aibrix-prefix-cache"
    wants_kv_events = False

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        self._rng = Random(seed)
        self.in_flight = InFlight(facts.replicas)
        self._capacity = max(1, TABLE_TOKENS // facts.engine.block_size)
        # Block -> when it was last sent, and to whom ever; the least recently sent first.
        self._table: OrderedDict[int, tuple[float, set[int]]] = OrderedDict()

    def matches(self, request: SimRequest, workers: set[int]) -> dict[int, int]:
        """Percent of the prompt that each of `workers` matches, where it is anything."""
        percents: dict[int, int] = {}
        left = set(workers)
        for index, block in enumerate(request.prefix, 1):
            known = self._table.get(block)
            if known is None:
                break
            left &= known[1]
            if not left:
                break
            percent = index * request.block_size * 100 // request.prompt_tokens
            percents.update(dict.fromkeys(left, percent))
        return percents

    def choose(self, request: SimRequest) -> int:
        """The worker, before anything is booked."""
        counts = self.in_flight.counts
        least = min(counts)
        candidates = {worker for worker, count in enumerate(counts) if count == least}
        if max(counts) - least <= IMBALANCE_ABS_COUNT:
            candidates = set(range(len(counts)))
        percents = self.matches(request, candidates)
        limit = fmean(counts) + DEVIATION_FACTOR * (stdev(counts) if len(counts) > 1 else 0.0)
        ordered = self._rng.sample(sorted(percents), len(percents))
        ordered.sort(key=lambda worker: (-percents[worker], counts[worker]))
        for worker in ordered:
            if counts[worker] <= limit:
                return worker
        return self._rng.choice([worker for worker, count in enumerate(counts) if count == least])

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        while self._table:
            block, (sent_at, _) = next(iter(self._table.items()))
            if now - sent_at <= FORGET_AFTER_S:
                break
            del self._table[block]
        worker = self.choose(request)
        for block in request.prefix:
            _, workers = self._table.get(block, (now, set()))
            workers.add(worker)
            self._table[block] = (now, workers)
            self._table.move_to_end(block)
            if len(self._table) > self._capacity:
                self._table.popitem(last=False)
        self.in_flight.begin(request.request_id, worker)
        return worker

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        del cached_tokens, output_tokens, now
        self.in_flight.end(request_id)
