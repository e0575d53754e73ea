"""`llmd-default`: llm-d's endpoint picker as its chart installs it.

    score = 2 * queue + 2 * kv + 3 * prefix            the highest goes first, ties by chance
    queue = (max waiting - waiting) / (max - min)      1 for all when they are equal
    kv    = 1 - kv-cache usage
    prefix = matched chunks / chunks                   see `llmd_prefix_index`

`waiting` and usage are those of the last scrape, every 50 ms; one that never came reads as 0. The weights and
scorers are `default-plugins.yaml` of the chart; the prefix scorer's match-length weight is 0 by default.

Source: llm-d-router v0.9.0 (main at ebab687, August 2026), `scheduling/scorer/{queuedepth,
kvcacheutilization,prefix}`, `scheduling/picker/maxscore`, `config/charts/routerlib/templates/_config.yaml`.
Not modelled: flow control (saturation and shedding), which only acts when it is configured.
"""

from random import Random

from extproc.core.types import EngineMetrics
from extproc.sim.routing import FleetFacts, NullRouter, SimRequest
from loadtests.peers.llmd_prefix_index import ApproximatePrefixIndex

QUEUE_WEIGHT = 2.0
KV_WEIGHT = 2.0
PREFIX_WEIGHT = 3.0
SCRAPE_INTERVAL_S = 0.05


class LlmdDefault(NullRouter):
    """See the module's docstring."""

    name = "llmd-default"
    wants_kv_events = False
    scrape_interval_s = SCRAPE_INTERVAL_S

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        self._rng = Random(seed)
        self.index = ApproximatePrefixIndex(facts.engine.block_size)
        self._waiting = [0] * facts.replicas
        self._usage = [0.0] * facts.replicas
        self._gpu_blocks: list[int | None] = [None] * facts.replicas

    def scores(self, chunks: list[int]) -> list[float]:
        """The weighted score of each worker for a prompt of these chunks."""
        matched = self.index.match(chunks)
        low, high = min(self._waiting), max(self._waiting)
        scores = []
        for worker, (waiting, usage) in enumerate(zip(self._waiting, self._usage, strict=True)):
            queue = 1.0 if high == low else (high - waiting) / (high - low)
            prefix = matched.get(worker, 0) / len(chunks) if chunks else 0.0
            scores.append(QUEUE_WEIGHT * queue + KV_WEIGHT * (1.0 - usage) + PREFIX_WEIGHT * prefix)
        return scores

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        del now
        chunks = self.index.chunks(request)
        scores = self.scores(chunks)
        best = max(scores)
        worker = self._rng.choice([worker for worker, score in enumerate(scores) if score == best])
        self.index.add(chunks, worker, self._gpu_blocks[worker])
        return worker

    def on_metrics(self, worker: int, metrics: EngineMetrics, now: float) -> None:
        """See `FleetRouter`."""
        del now
        self._waiting[worker] = metrics.waiting or 0
        self._usage[worker] = metrics.kv_usage or 0.0
        self._gpu_blocks[worker] = metrics.num_gpu_blocks
