"""`dynamo-formula`: NVIDIA Dynamo's KV router by its published formula; `dynamo` runs the real one.

    cost    = prefill_scale * max(0, raw_prefill_blocks - overlap_credit * overlap) + decode_blocks
              + request_weight * active requests                  the lowest goes first, ties by chance
    raw_prefill_blocks = (active prefill tokens of the worker + tokens of the prompt) / block size
    decode_blocks      = blocks of the worker's active requests and of this one, equal ones counted once

Defaults: prefill_scale 1, overlap_credit 1 without decay, request_weight 0, temperature 0. `overlap` is the
worker's leading blocks by its KV events. A request books its uncovered tokens as active prefill until its
first token, and its prompt's blocks until it ends; blocks of the output are not tracked by default.
Lost events go unnoticed: what was known stays.

Source: ai-dynamo-runtime 1.6.1; dynamo main (August 2026), `lib/kv-router/src/scheduling/selector`. Tested to
choose like the real selection service, which `dynamo` drives, on random sequences.

Mapping. A prompt's last tokens, beyond the blocks an engine can hit, count for the prefill. If they fill a
block it counts for the decode, as one that nobody shares; if not it does not, as in Dynamo.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

from extproc.core.types import KvEvent
from extproc.sim.routing import FleetFacts, NullRouter, SimRequest
from loadtests.peers.exact_index import ExactIndex


class _Booking:
    __slots__ = ("blocks", "prefill_tokens", "worker")

    def __init__(self, worker: int, prefill_tokens: int, blocks: list[int]) -> None:
        self.worker = worker
        self.prefill_tokens = prefill_tokens
        self.blocks = blocks


class DynamoFormula(NullRouter):
    """See the module's docstring."""

    name = "dynamo-formula"
    wants_kv_events = True

    def __init__(
        self,
        facts: FleetFacts,
        seed: int,
        *,
        prefill_scale: float = 1.0,
        overlap_credit: float = 1.0,
        request_weight: float = 0.0,
    ) -> None:
        self._rng = Random(seed)
        self._prefill_scale = prefill_scale
        self._overlap_credit = overlap_credit
        self._request_weight = request_weight
        self.index = ExactIndex(facts.replicas)
        self.prefill_tokens = [0] * facts.replicas
        self.active: list[Counter[int]] = [Counter() for _ in range(facts.replicas)]
        self._requests = [0] * facts.replicas
        self._bookings: dict[str, _Booking] = {}
        self._rests = 0

    def costs(self, request: SimRequest) -> list[float]:
        """The cost of each worker, in blocks."""
        size = request.block_size
        rest = 1 if _fills_a_block(request) else 0
        costs = []
        for worker, active in enumerate(self.active):
            overlap = self.index.overlap(worker, request.prefix)
            raw = (self.prefill_tokens[worker] + request.prompt_tokens) / size
            prefill = max(0.0, raw - self._overlap_credit * overlap)
            new = sum(1 for block in request.prefix if block not in active)
            costs.append(
                self._prefill_scale * prefill
                + len(active)
                + new
                + rest
                + self._request_weight * self._requests[worker]
            )
        return costs

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        del now
        costs = self.costs(request)
        least = min(costs)
        worker = self._rng.choice([worker for worker, cost in enumerate(costs) if cost == least])
        self.book(request, worker)
        return worker

    def book(self, request: SimRequest, worker: int) -> None:
        """`request` goes to `worker`."""
        covered = self.index.overlap(worker, request.prefix) * request.block_size
        blocks = list(request.prefix)
        if _fills_a_block(request):
            self._rests -= 1
            blocks.append(self._rests)
        booking = _Booking(worker, max(0, request.prompt_tokens - covered), blocks)
        self.prefill_tokens[worker] += booking.prefill_tokens
        self.active[worker].update(blocks)
        self._requests[worker] += 1
        self._bookings[request.request_id] = booking

    def on_first_token(self, request_id: str, now: float) -> None:
        """See `FleetRouter`."""
        del now
        booking = self._bookings[request_id]
        self.prefill_tokens[booking.worker] -= booking.prefill_tokens
        booking.prefill_tokens = 0

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        del cached_tokens, output_tokens
        self.on_first_token(request_id, now)
        booking = self._bookings.pop(request_id)
        active = self.active[booking.worker]
        active.subtract(booking.blocks)
        for block in booking.blocks:
            if not active[block]:
                del active[block]
        self._requests[booking.worker] -= 1

    def on_kv_events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """See `FleetRouter`."""
        del now
        self.index.apply(worker, events)


def _fills_a_block(request: SimRequest) -> bool:
    """Whether the tokens beyond the blocks that can be hit are as many as a block has."""
    return request.prompt_tokens >= (len(request.prefix) + 1) * request.block_size
