"""Our own router in the simulated fleet: the very `Router` of the live server, one per run.

It is told what the live server would learn: ends with usage and the time of the first byte, as Envoy's access
log reports them, KV events, metrics scrapes; and first tokens while they happen only where the live server is
set to observe them (`first_token_observer`, off by default). Nothing is tuned to the fleet; what it knows of
the engines it learns.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from random import Random

from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.namespace import Namespace
from extproc.core.policies import POLICIES
from extproc.core.router import Router
from extproc.core.types import Completion, EngineMetrics, KvEvent, Member, Outcome, RoutingRequest, WorkerId
from extproc.sim.routing import FleetFacts, RouterMaker, SimRequest

_POOL = "sim"
_REVISIONS = ("sim", "sim")
_NAMESPACE = Namespace(*_REVISIONS)
_TICK_S = 1.0
_OBSERVING = "+first-token"


class HostedRouter:
    """A `FleetRouter` around the core's `Router` with one of its policies.

    Args:
        policy: name of the policy.
        facts: the fleet.
        seed: of the router's own randomness.
        first_tokens: whether first tokens are seen while they happen.
        costs: coefficients of the cost model; None: the defaults.
    """

    def __init__(
        self,
        policy: str,
        facts: FleetFacts,
        seed: int,
        *,
        first_tokens: bool = False,
        costs: CostSettings | None = None,
    ) -> None:
        self.name = f"{policy}{_OBSERVING}" if first_tokens else policy
        self._first_tokens = first_tokens
        leases = count()
        size = facts.engine.block_size
        costs = costs or CostSettings()
        self.router = Router(
            policy=POLICIES[policy](costs),
            rng=Random(seed),  # noqa: S311 - a simulation
            new_lease_id=lambda: str(next(leases)),
            pools={_POOL: PoolFacts(*_REVISIONS, size)},
            costs=costs,
        )
        self._size = size
        self._model = facts.model
        self._workers = [
            WorkerId(f"10.{at >> 16}.{at >> 8 & 255}.{at & 255}:8000") for at in range(facts.replicas)
        ]
        self._index = {worker: at for at, worker in enumerate(self._workers)}
        self._open: dict[str, tuple[str, float, int]] = {}  # request id -> lease, sent at, prompt tokens
        self._first: dict[str, float] = {}  # request id -> time to first token, seconds
        self._next_tick = _TICK_S
        self.router.on_membership((Member(worker.endpoint, _POOL) for worker in self._workers), 0.0)
        for worker in self._workers if facts.kv_events else ():
            self.router.on_kv_trust(worker, "subscribed before the first event", trusted=True)

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        if now >= self._next_tick:
            self.router.tick(now)
            self._next_tick = now + _TICK_S
        return self.place(self.ask(request), now)

    def ask(self, request: SimRequest) -> RoutingRequest:
        """A request as the router takes it."""
        return RoutingRequest(
            request_id=request.request_id,
            model=self._model,
            pool=_POOL,
            namespace=_NAMESPACE,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            stream=True,
            tenant=request.tenant,
            chains={self._size: (request.prefix,)},
        )

    def place(self, ask: RoutingRequest, now: float) -> int:
        """Schedule it."""
        decision = self.router.schedule(ask, now)
        self._open[ask.request_id] = (decision.lease_id, now, ask.prompt_tokens)
        return self._index[decision.chosen.worker]

    def on_first_token(self, request_id: str, now: float) -> None:
        """See `FleetRouter`."""
        lease_id, sent_at, _ = self._open[request_id]
        self._first[request_id] = now - sent_at
        if self._first_tokens:
            self.router.on_first_token(lease_id, now)

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        lease_id, sent_at, prompt_tokens = self._open.pop(request_id)
        first_s = self._first.pop(request_id, None)
        first_ms = None if first_s is None else first_s * 1000.0
        finished = output_tokens is not None
        completion = Completion(
            outcome=Outcome.FINISHED if finished else Outcome.CANCELLED,
            first_body_ms=first_ms,
            upstream_first_body_ms=first_ms,
            duration_ms=(now - sent_at) * 1000.0,
            prompt_tokens=prompt_tokens if finished else None,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
        )
        self.router.release(lease_id, completion, now)

    def on_kv_events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """See `FleetRouter`."""
        self.router.on_kv_events(self._workers[worker], events, now)

    def on_kv_gap(self, worker: int, now: float) -> None:
        """See `FleetRouter`."""
        del now
        self.router.on_kv_trust(self._workers[worker], "events were lost", trusted=False)

    def on_metrics(self, worker: int, metrics: EngineMetrics, now: float) -> None:
        """See `FleetRouter`."""
        self.router.on_metrics(self._workers[worker].endpoint, {0: metrics}, now)


OURS: dict[str, RouterMaker] = {
    **{policy: partial(HostedRouter, policy) for policy in POLICIES},
    f"token-load{_OBSERVING}": partial(HostedRouter, "token-load", first_tokens=True),
}
"""Our router by policy. `+first-token`: with `first_token_observer` on."""
