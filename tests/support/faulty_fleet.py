"""A simulated fleet in which KV events are lost and engines restart, and what its router believed.

    fleet = FaultyFleet(workload, settings, faults=[Fault("silent", at=10.0, worker=1)])
    claims = fleet.run_claims()            # one per finished request, in the order of routing
    false_credit(claims)                   # share of the predicted tokens that were not there

Faults, at a moment and on one worker:
    gap      its events get lost for `lasts` seconds; the router is told, and there is no replay
    silent   its events stop for good, and nobody is told
    restart  the engine is replaced by an empty one; what ran there fails, and the event stream says so
    wiped    the engine is replaced likewise, and nothing says so: its event stream is dead as well
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from extproc.core.types import Decision
from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.fleet_engine import FleetEngine
from extproc.sim.hosted_router import HostedRouter
from extproc.sim.sessions import Workload


class Fault(NamedTuple):
    kind: str
    at: float
    worker: int
    lasts: float = 0.0


class Claim(NamedTuple):
    """What was predicted of one request, and what came of it. Tokens; `at` is when it was routed."""

    at: float
    worker: int
    predicted: int
    actual: int
    prompt: int


class Witness(HostedRouter):
    """Our router, and a record of what it predicted."""

    def __init__(self, policy: str, facts: Any, seed: int, **fields: Any) -> None:
        super().__init__(policy, facts, seed, **fields)
        self.decisions: dict[str, Decision] = {}
        self.claims: dict[str, Claim] = {}
        inner = self.router.schedule

        def schedule(request: Any, now: float) -> Decision:
            decision = self.decisions[request.request_id] = inner(request, now)
            return decision

        self.router.schedule = schedule  # type: ignore[method-assign]  # listens in

    def on_finished(self, request_id: str, cached: int | None, output: int | None, now: float) -> None:
        decision = self.decisions.pop(request_id)
        if cached is not None:
            chosen = decision.chosen
            self.claims[request_id] = Claim(
                decision.decided_at,
                self._index[chosen.worker],
                chosen.cached_tokens,
                cached,
                decision.request.prompt_tokens,
            )
        super().on_finished(request_id, cached, output, now)

    def on_kv_restart(self, worker: int) -> None:
        """As the subscriber says it, once it has compared a replay with what it knows."""
        self.router.on_kv_reset(self._workers[worker])
        self.router.on_kv_trust(self._workers[worker], "the engine restarted", trusted=True)


class FaultyFleet(Fleet):
    def __init__(
        self,
        workload: Workload,
        settings: FleetSettings,
        faults: Sequence[Fault] = (),
        policy: str = "token-load",
        **fields: Any,
    ) -> None:
        super().__init__(workload, lambda facts, seed: Witness(policy, facts, seed, **fields), settings)
        self._kind = len(super()._handlers())  # after everything else that happens at one instant
        self.faults = faults
        self._dead: set[int] = set()  # publish nothing that arrives
        self._epoch = [0] * settings.replicas
        for fault in faults:
            self._push(fault.at, self._kind, fault)

    def run_claims(self) -> list[Claim]:
        """Run; what was claimed, in the order of routing."""
        self.run()
        return sorted(self.router.claims.values())

    def _handlers(self) -> Any:
        return (*super()._handlers(), self._fault)

    def _publish_events(self, worker: int, result: Any) -> None:
        if worker not in self._dead:
            super()._publish_events(worker, result)

    def _fault(self, now: float, fault: Any) -> None:
        worker = fault.worker
        match fault.kind:
            case "gap":
                self._dead.add(worker)
                self._push(now + fault.lasts, self._kind, Fault("gap over", now + fault.lasts, worker))
            case "gap over":
                self._dead.discard(worker)
                self.router.on_kv_gap(worker, now)
            case "silent":
                self._dead.add(worker)
            case "restart":
                self._replace(worker, now)
                self.router.on_kv_restart(worker)
            case "wiped":
                self._dead.add(worker)
                self._replace(worker, now)
            case kind:
                raise ValueError(f"no fault is called {kind}")

    def _submit(self, now: float, what: Any) -> None:
        if what.request.request_id in self._flights:
            super()._submit(now, what)

    def _first(self, now: float, what: Any) -> None:
        if what in self._flights:
            super()._first(now, what)

    def _finish(self, now: float, what: Any) -> None:
        if what.request.request_id in self._flights:
            super()._finish(now, what)

    def _replace(self, worker: int, now: float) -> None:
        """An empty engine instead of this one; what it was doing fails."""
        self.engines[worker] = FleetEngine(self.settings.engine)
        self.engines[worker].pool.emit_events = self._wants_events
        for flight in [flight for flight in self._flights.values() if flight.worker == worker]:
            self._failed(flight, "the engine died", now, routed=True)


def false_credit(claims: Iterable[Claim]) -> float:
    """Tokens that were predicted and not there, as a share of those predicted."""
    claims = list(claims)
    predicted = sum(claim.predicted for claim in claims)
    return sum(max(0, claim.predicted - claim.actual) for claim in claims) / max(1, predicted)


def missed_credit(claims: Iterable[Claim]) -> float:
    """Tokens that were there and not predicted, as a share of those that were there."""
    claims = list(claims)
    actual = sum(claim.actual for claim in claims)
    return sum(max(0, claim.actual - claim.predicted) for claim in claims) / max(1, actual)


def cached_share(claims: Iterable[Claim]) -> float:
    """Share of prompt tokens found in a cache."""
    claims = list(claims)
    return sum(claim.actual for claim in claims) / sum(claim.prompt for claim in claims)
