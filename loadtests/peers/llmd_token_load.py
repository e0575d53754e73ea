"""`llmd-token-load`: llm-d's guides since August 2026: a prefix-affinity filter, then token load.

Filter. Workers whose match is at least 0.80 of the prompt's chunks are sticky. If there are any, only they
stay, unless the best predicted TTFT among them exceeds the best among the others by more than 18,000 ms.
TTFT is a worker's tokens in flight / 15,928 a second.

Score, for those that stay; the highest goes first, ties by chance:

    1 - min(4,194,304, tokens in flight + uncached tokens of this request) / 4,194,304

Tokens in flight are the uncached tokens of the requests sent to a worker, by `llmd_prefix_index`, each from
the moment it is sent to its first chunk. Output is not counted (`addEstimatedOutputTokens` is off).

Source: llm-d-router v0.9.0 (main at ebab687, August 2026), `scheduling/filter/prefixcacheaffinity`,
`scheduling/scorer/tokenload`, `requestcontrol/dataproducer/inflightload`; defaults throughout. The rate
15,928 is llm-d's own default whatever the engine; `peak_prefill_throughput` sets another.
"""

from functools import partial
from random import Random

from extproc.core.types import EngineMetrics
from extproc.sim.routing import FleetFacts, NullRouter, SimRequest
from loadtests.peers.llmd_prefix_index import ApproximatePrefixIndex

AFFINITY_THRESHOLD = 0.80
MAX_TTFT_PENALTY_MS = 18_000.0
PEAK_PREFILL_THROUGHPUT = 15_928.0
QUEUE_THRESHOLD_TOKENS = 4_194_304


class LlmdTokenLoad(NullRouter):
    """See the module's docstring."""

    name = "llmd-token-load"
    wants_kv_events = False
    scrape_interval_s = 0.05

    def __init__(
        self, facts: FleetFacts, seed: int, *, peak_prefill_throughput: float = PEAK_PREFILL_THROUGHPUT
    ) -> None:
        self._rng = Random(seed)
        self._throughput = peak_prefill_throughput
        self.index = ApproximatePrefixIndex(facts.engine.block_size)
        self._gpu_blocks: list[int | None] = [None] * facts.replicas
        self._in_flight: dict[str, tuple[int, int]] = {}  # request -> worker, tokens
        self.tokens = [0] * facts.replicas

    def sticky(self, shares: list[float]) -> list[int]:
        """The workers that pass the filter, given the share of the prompt each matches."""
        everyone = list(range(len(shares)))
        sticky = [worker for worker in everyone if shares[worker] >= AFFINITY_THRESHOLD]
        others = [worker for worker in everyone if shares[worker] < AFFINITY_THRESHOLD]
        if not sticky or not others:
            return everyone
        excess = min(map(self._ttft_ms, sticky)) - min(map(self._ttft_ms, others))
        return everyone if excess > MAX_TTFT_PENALTY_MS else sticky

    def _ttft_ms(self, worker: int) -> float:
        return self.tokens[worker] / self._throughput * 1000.0

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        del now
        chunks = self.index.chunks(request)
        matched = self.index.match(chunks)
        total = len(chunks)
        replicas = range(len(self.tokens))
        stay = self.sticky([matched.get(worker, 0) / total if total else 0.0 for worker in replicas])
        uncached = partial(self.index.uncached_tokens, request.prompt_tokens)
        left = {worker: uncached(matched.get(worker, 0), total) for worker in stay}
        load = {w: min(QUEUE_THRESHOLD_TOKENS, self.tokens[w] + left[w]) for w in stay}
        least = min(load.values())
        worker = self._rng.choice([worker for worker in stay if load[worker] == least])
        self.tokens[worker] += left[worker]
        self._in_flight[request.request_id] = (worker, left[worker])
        self.index.add(chunks, worker, self._gpu_blocks[worker])
        return worker

    def on_first_token(self, request_id: str, now: float) -> None:
        """See `FleetRouter`."""
        del now
        booked = self._in_flight.pop(request_id, None)
        if booked is not None:
            worker, tokens = booked
            self.tokens[worker] -= tokens

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        del cached_tokens, output_tokens
        self.on_first_token(request_id, now)

    def on_metrics(self, worker: int, metrics: EngineMetrics, now: float) -> None:
        """See `FleetRouter`."""
        del now
        self._gpu_blocks[worker] = metrics.num_gpu_blocks
