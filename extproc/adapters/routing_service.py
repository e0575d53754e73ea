"""One request, from what Envoy sent to where it goes: prepare, schedule, answer, and account for its end.

Whatever cannot be understood is routed by load. Refused are only a body that no engine could read, a pool
with nothing ready, and what `admission` refuses: tenants where they may not go, and unknown models.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from extproc.adapters.admission import Admission, RefusedError, Visitor
from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.held_requests import HeldRequests
from extproc.adapters.holding import Ask
from extproc.adapters.prompt_normalizer import NormalizedRequest
from extproc.adapters.request_preparation import PoolContext, RequestPreparation
from extproc.adapters.routing import HttpRequest
from extproc.adapters.telemetry.recorder import Telemetry
from extproc.adapters.telemetry.stages import DECIDE, Stages
from extproc.core.destinations import named_rank
from extproc.core.errors import NoEndpointError
from extproc.core.model_catalog import ModelCatalog
from extproc.core.outcomes import STOPPED, Released
from extproc.core.rollout import Mode, Rollout
from extproc.core.router import Router
from extproc.core.types import Completion, Decision, Outcome, RoutingRequest
from extproc.protocol.body_limits import DEFAULT_LIMITS, BodyLimits
from extproc.protocol.endpoint_picker import POOL_HEADER, WORKERS_HEADER
from extproc.protocol.ext_proc_messages import PassThrough, Route
from extproc.protocol.openai import BadRequest
from extproc.protocol.rejections import Reject, left_while_held, no_ready_endpoint

DP_RANK_HEADER = "x-data-parallel-rank"
_HASH_BYTES = 44  # of one in a tuple


@dataclass(slots=True)
class ServiceCounters:
    """What happened, since the start.

    `normalization`: requests by outcome; `normalized`: changes by rule, applied ones only.
    """

    routed: int = 0
    load_only: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    exact: int = 0
    mispredicted: int = 0
    lost: int = 0
    normalization: dict[str, int] = field(default_factory=dict)
    normalized: dict[str, int] = field(default_factory=dict)


class WarmRoutingService:
    """Implements `RoutingService` with a `Router`.

    Args:
        router: decides; owned by the same event loop.
        pools: contexts by pool name, the default one first.
        log: where finished requests are written.
        clock: monotonic seconds.
        fallback_count: how many endpoints a decision names.
        session_header: request header that names the session.
        policy_header: request header that may choose the policy; None: none may.
        telemetry: watches; None: one that nobody reads.
        admission: who may go where; None: everyone everywhere.
        rollout: how far decisions are acted on.
        baseline: the policy that decides in mode shadow; the router must know it.
        on_unknown_model: told when a model was refused that no pool is known to serve.
        held: holds requests while every worker is full; None: nothing does.
        body_limits: how much of a body is read.
    """

    def __init__(
        self,
        router: Router,
        pools: Mapping[str, PoolContext],
        log: DecisionLog,
        clock: Callable[[], float],
        fallback_count: int,
        session_header: str = "x-session-id",
        policy_header: str | None = None,
        telemetry: Telemetry | None = None,
        admission: Admission | None = None,
        rollout: Rollout | None = None,
        baseline: str | None = None,
        on_unknown_model: Callable[[], None] = lambda: None,
        held: HeldRequests | None = None,
        body_limits: BodyLimits = DEFAULT_LIMITS,
    ) -> None:
        self._router = router
        self._telemetry = telemetry or Telemetry(clock)
        self._pools = dict(pools)
        self._admission = admission or Admission(
            ModelCatalog({name: tuple(pool.base_models) for name, pool in pools.items()})
        )
        self._requests = RequestPreparation(
            router.table,
            self._pools,
            self._admission,
            rollout=rollout or Rollout(),
            baseline=baseline,
            session_header=session_header,
            policy_header=policy_header,
            body_limits=body_limits,
            on_unknown_model=on_unknown_model,
            on_normalized=self._normalized,
        )
        self._held = held
        self._log = log
        self._clock = clock
        self._fallback_count = fallback_count
        self.counters = ServiceCounters()

    async def route(self, request: HttpRequest) -> Route | Reject | PassThrough:
        """See `RoutingService`."""
        stages = self._telemetry.begin()
        answer = await self._route(request, stages)
        if isinstance(answer, Reject):
            self._telemetry.rejected(request, answer, stages)
        return answer

    async def _route(self, request: HttpRequest, stages: Stages) -> Route | Reject | PassThrough:
        try:
            visitor, ask, body = await self._requests.prepare(request, stages)
            decision = await self._schedule(request, ask, body, stages)
        except RefusedError as error:
            return self._rejected(error.reject)
        except BadRequest as error:
            return self._rejected(
                Reject(error.status, error.message, "malformed", code=error.code, param=error.param)
            )
        except NoEndpointError as error:
            return self._rejected(no_ready_endpoint(f"{error}; try again later."))
        self.counters.routed += 1
        if decision.chosen.block_size is not None:
            self._requests.block_size_is(ask.pool, decision.chosen.block_size)
        if ask.load_only is not None:
            counts = self.counters.load_only
            counts[ask.load_only] = counts.get(ask.load_only, 0) + 1
        endpoints = self._endpoints_of(request, decision, visitor)
        stages.mark(DECIDE)
        watched = self._telemetry.decided(request, decision, stages)
        headers = {**({} if endpoints is None else self._headers(decision)), **watched}
        if len(self._pools) > 1:
            headers[POOL_HEADER] = ask.pool
        if visitor.policy.workers is not None:
            headers[WORKERS_HEADER] = "named"
        return Route(endpoints, decision.lease_id, headers, body)

    async def _schedule(
        self, http: HttpRequest, ask: RoutingRequest, body: bytes | None, stages: Stages
    ) -> Decision:
        """The decision; where requests are held, as soon as there is room."""
        if self._held is None or http.override is not None:
            return self._router.schedule(ask, self._clock(), stages.mark)
        prompts = sum(prompt.itemsize * len(prompt) for prompt in ask.prompts)
        chains = sum(len(chain) for found in (ask.chains or {}).values() for chain in found)
        size = len(http.body) + len(body or b"") + prompts + _HASH_BYTES * chains
        try:
            return await self._held.schedule(Ask(ask, http.headers, size, http.more_time, stages.mark))
        except asyncio.CancelledError:
            stages.about |= _wait_attributes(ask)
            self._telemetry.rejected(http, left_while_held(), stages)
            raise
        finally:
            stages.about |= _wait_attributes(ask)

    def first_body(self, lease_id: str) -> None:
        """See `RoutingService`."""
        now = self._clock()
        self._router.on_first_token(lease_id, now)
        self._router.on_progress(lease_id, 0, now)
        self._look_for_room()

    def served(self, lease_id: str, endpoint: str) -> None:
        """See `RoutingService`."""
        self._router.on_served(lease_id, endpoint, self._clock())

    def stream_ended(self, lease_id: str, *, cancelled: bool) -> None:
        """See `RoutingService`. Neither kind of end proves that the request is over."""
        ended = self._router.on_stream_ended(lease_id, self._clock(), undelivered=cancelled)
        if ended is not None:
            self.finish(ended)

    def completed(self, lease_id: str, completion: Completion) -> None:
        """See `RoutingService`."""
        self.finish(self._router.release(lease_id, completion, self._clock()))

    def left_early(self, request_id: str, completion: Completion) -> bool:
        """See `RoutingService`."""
        ended = self._router.on_left_early(request_id, completion, self._clock())
        if ended is not None:
            self.finish(ended)
        return ended is not None

    def access_log_streams(self, open_streams: int) -> None:
        """See `RoutingService`."""
        self._router.on_access_log(is_open=open_streams > 0)

    def models_learned(self, endpoint: str, pool: str, base: Iterable[str], adapters: Iterable[str]) -> None:
        """A server of `pool` told everything it serves now."""
        self._admission.catalog.on_models(endpoint, pool, base, adapters)

    def finish(self, *released: Released | None) -> None:
        """Audit and log leases that have ended."""
        for one in released:
            if one is None:
                continue
            if one.prediction_was_exact is not None:
                if one.prediction_was_exact:
                    self.counters.exact += 1
                else:
                    self.counters.mispredicted += 1
            if one.completion.outcome is Outcome.LOST:
                self.counters.lost += 1
            self._telemetry.finished(one)
            self._log.write(one)
        self._look_for_room()

    def stopped(self) -> None:
        """Nothing more is heard, and nobody is told of loads any more: log what is open as it is."""
        # The newest first: those behind one in the queue of prefill move when it leaves.
        for lease in reversed(self._router.unfinished()):
            self.completed(lease.id, STOPPED)

    # --- inside ------------------------------------------------------------------------------------

    def _look_for_room(self) -> None:
        if self._held is not None:
            self._held.look()

    def _endpoints_of(
        self, http: HttpRequest, decision: Decision, visitor: Visitor
    ) -> tuple[str, ...] | None:
        """What the gateway is told; None: it chooses."""
        if http.override is not None:
            members = self._requests.members(decision.request.pool)
            allowed = {worker.endpoint for worker in members if visitor.policy.permits(worker)}
            return tuple(name for name in self._requests.overridden(http.override) if name in allowed)
        if decision.request.mode is Mode.OBSERVE:
            return None
        return self._router.destinations(decision, self._fallback_count)

    def _headers(self, decision: Decision) -> dict[str, str]:
        rank = named_rank(decision, self._router.table)
        return {} if rank is None else {DP_RANK_HEADER: str(rank)}

    def _normalized(self, normal: NormalizedRequest) -> None:
        report = normal.report
        if report is None:
            return
        counts = self.counters.normalization
        counts[report.outcome] = counts.get(report.outcome, 0) + 1
        if normal.body is not None:
            changes = self.counters.normalized
            for rule, count in report.changes.items():
                changes[rule] = changes.get(rule, 0) + count

    def _rejected(self, reject: Reject) -> Reject:
        counts = self.counters.rejected
        counts[reject.why] = counts.get(reject.why, 0) + 1
        return reject


def _wait_attributes(ask: RoutingRequest) -> dict[str, str | float]:
    """What spans say of a request that may have been held."""
    if ask.admission is None:
        return {}
    found: dict[str, str | float] = {
        "warmroute.held_ms": ask.admission.held_ms,
        "warmroute.priority": ask.admission.priority,
    }
    return found | {"warmroute.tenant": ask.tenant} if ask.tenant else found
