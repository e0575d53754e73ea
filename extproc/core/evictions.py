"""How many KV blocks a worker's engine evicted while a request was there.

What is counted is what left the GPU, as KV events tell, between the decision and the end of the request.
Requests that run side by side each see the same evictions: compare averages, do not add them up.
"""

from collections.abc import Iterable, Sequence

from extproc.core.types import BlockRemoved, KvEvent, Tier, WorkerId


class Evictions:
    """Counts by worker, and where they stood when each open request began."""

    def __init__(self) -> None:
        self._counts: dict[WorkerId, int] = {}
        self._begun: dict[str, dict[str, int]] = {}

    def on_events(self, worker: WorkerId, events: Sequence[KvEvent]) -> None:
        """An engine told what it stored and removed."""
        removed = sum(
            len(event.block_hashes)
            for event in events
            if isinstance(event, BlockRemoved) and event.tier is Tier.GPU
        )
        self._counts[worker] = self._counts.get(worker, 0) + removed

    def forget(self, worker: WorkerId) -> None:
        """A worker left."""
        self._counts.pop(worker, None)

    def begin(self, request: str, workers: Iterable[WorkerId]) -> None:
        """A request begins that one of `workers` will serve."""
        self._begun[request] = {
            worker.endpoint: self._counts[worker] for worker in workers if worker in self._counts
        }

    def end(self, request: str, worker: WorkerId) -> int | None:
        """Blocks evicted there since the request began; None: no events of that worker were seen before."""
        before = self._begun.pop(request, {}).get(worker.endpoint)
        now = self._counts.get(worker)
        return None if before is None or now is None else max(0, now - before)
