"""Our router with admission in the simulated fleet: requests are held while every worker is full.

The queue and the notion of a full worker are those of the live server, `extproc.core.admission_queue` and
`extproc.core.saturation`, and so is what is done with them (see `extproc.adapters.held_requests`), but for
deadlines and clients that leave: simulated ones do neither, and do not ask again when they are refused.
"""

from functools import partial
from typing import Any

from extproc.core.admission_queue import AdmissionQueue, Waiting, work_of
from extproc.core.policies import POLICIES
from extproc.core.saturation import Saturation
from extproc.core.types import RoutingRequest
from extproc.sim.hosted_router import HostedRouter
from extproc.sim.routing import HELD, FleetFacts, RouterMaker, SimRequest

_NAME = "+admission"
_HOPELESS = 2.0


class HoldingRouter(HostedRouter):
    """A `FleetRouter` that holds requests, as `FleetFacts.hold` says."""

    def __init__(self, policy: str, facts: FleetFacts, seed: int, **options: Any) -> None:
        super().__init__(policy, facts, seed, **options)
        self.name = f"{policy}{_NAME}"
        self._hold = facts.hold
        self._saturation = Saturation(self.router, facts.hold.room)
        self._queue = AdmissionQueue(facts.hold.queue)
        self._asks: dict[str, RoutingRequest] = {}
        self._refused: list[tuple[str, int | None]] = []

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        ask = self.ask(request)
        if not self._queue and self._saturation.room(ask, now):
            return super().route(request, now)
        hold, tenant = self._hold, request.tenant
        entry = Waiting(
            id=request.request_id,
            tenant=tenant,
            weight=hold.weights.get(tenant, 1.0),
            priority=hold.priorities.get(tenant, 0),
            work=work_of(ask.prompt_tokens, self.router.learned.outputs.estimate(ask, now).expected, 1),
            size=0,
            arrived_at=now,
            leave_by=now + hold.max_wait_s,
        )
        wait_s = self._queue.wait_s(tenant, entry.priority, entry.weight, now)
        self._asks[entry.id] = ask
        self._queue.enter(entry, now)
        if wait_s is not None and wait_s > _HOPELESS * hold.max_wait_s:
            self._queue.leave(entry.id)
            self._refuse(entry)
        for gone in self._queue.overflow():
            self._refuse(gone)
        return HELD

    def released(self, now: float) -> list[tuple[str, int | None]]:
        """See `HoldsRequests`."""
        for late in self._queue.expire(now):
            self._refuse(late)
        released, self._refused = self._refused, []
        while (
            entry := self._queue.pop(now, lambda one: self._saturation.room(self._asks[one.id], now))
        ) is not None:
            released.append((entry.id, self._go(self._asks.pop(entry.id), now)))
        return released

    def _go(self, ask: RoutingRequest, now: float) -> int:
        below = self._saturation.uncapped(ask, now)
        if below:
            ask.subset = below
        return self.place(ask, now)

    def _refuse(self, entry: Waiting) -> None:
        del self._asks[entry.id]
        self._refused.append((entry.id, None))


HOLDING: dict[str, RouterMaker] = {f"{policy}{_NAME}": partial(HoldingRouter, policy) for policy in POLICIES}
"""Our router with admission, by policy."""
