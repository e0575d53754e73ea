"""One request, from what Envoy sent to where it goes: parse, tokenize, schedule, and account for its end.

Whatever cannot be understood is routed by load. Refused are only a body that no engine could read, a pool
with nothing ready, and what `admission` refuses: tenants where they may not go, and unknown models.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from extproc.adapters.admission import Admission, Body, Destination, RefusedError, Visitor
from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.prompt_normalizer import NormalizedRequest, PromptNormalizer
from extproc.adapters.prompt_service import PromptService
from extproc.adapters.routing import HttpRequest
from extproc.adapters.telemetry.recorder import Telemetry
from extproc.adapters.telemetry.stages import DECIDE, NORMALIZE, PARSE, Stages
from extproc.core.errors import NoEndpointError
from extproc.core.model_catalog import ModelCatalog
from extproc.core.namespace import Namespace
from extproc.core.outcomes import Released
from extproc.core.prefix_classes import PrefixClass
from extproc.core.rollout import Mode, Rollout, Traffic
from extproc.core.router import Router, fallbacks
from extproc.core.types import Completion, Decision, Outcome, Rendition, RoutingRequest, WorkerId
from extproc.protocol.endpoint_picker import POOL_HEADER, WORKERS_HEADER, match_subset
from extproc.protocol.ext_proc_messages import PassThrough, Route
from extproc.protocol.openai import BadRequest, InferenceRequest, LoadOnly, parse_request
from extproc.protocol.rejections import Reject, no_ready_endpoint

DP_RANK_HEADER = "x-data-parallel-rank"
EXPECTED_OUTPUT_FIELD = "expected_output_tokens"
EXPECTED_OUTPUT_HEADER = "x-warmroute-expected-output-tokens"
PREFIX_CLASS_HEADER = "x-warmroute-prefix-class"
_BYTES_PER_TOKEN = 4  # only for requests that are routed by load


@dataclass(slots=True)
class PoolContext:
    """What the service knows of one pool.

    `base_models` are the configured base model names. `normalizer`: None leaves bodies alone. `revisions`:
    tokenizer revision and encoder of each other model revision whose prompts are rendered or encoded
    differently. `template_version` names the chat template.
    """

    name: str
    prompts: PromptService | None
    model_revision: str
    tokenizer_revision: str
    base_models: set[str] = field(default_factory=set)
    normalizer: PromptNormalizer | None = None
    revisions: Mapping[str, tuple[str, PromptService]] = field(default_factory=dict)
    template_version: str = ""


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
    ) -> None:
        self._router = router
        self._telemetry = telemetry or Telemetry(clock)
        self._pools = dict(pools)
        self._admission = admission or Admission(
            ModelCatalog({name: tuple(pool.base_models) for name, pool in pools.items()})
        )
        self._rollout = rollout or Rollout()
        self._baseline = baseline
        self._on_unknown_model = on_unknown_model
        self._log = log
        self._clock = clock
        self._fallback_count = fallback_count
        self._session_header = session_header.lower()
        self._policy_header = None if policy_header is None else policy_header.lower()
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
            visitor, ask, body = await self._prepare(request, stages)
            decision = self._router.schedule(ask, self._clock(), stages.mark)
        except RefusedError as error:
            return self._rejected(error.reject)
        except BadRequest as error:
            return self._rejected(
                Reject(error.status, error.message, "malformed", code=error.code, param=error.param)
            )
        except NoEndpointError as error:
            return self._rejected(no_ready_endpoint(f"{error}; try again later."))
        self.counters.routed += 1
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

    def first_body(self, lease_id: str) -> None:
        """See `RoutingService`."""
        now = self._clock()
        self._router.on_first_token(lease_id, now)
        self._router.on_progress(lease_id, 0, now)

    def served(self, lease_id: str, endpoint: str) -> None:
        """See `RoutingService`."""
        self._router.on_served(lease_id, endpoint, self._clock())

    def stream_ended(self, lease_id: str, *, cancelled: bool) -> None:
        """See `RoutingService`. Neither kind of end proves that the request is over."""
        self._router.on_stream_ended(lease_id, self._clock(), undelivered=cancelled)

    def completed(self, lease_id: str, completion: Completion) -> None:
        """See `RoutingService`."""
        self.finish(self._router.release(lease_id, completion, self._clock()))

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

    # --- inside ------------------------------------------------------------------------------------

    async def _prepare(
        self, request: HttpRequest, stages: Stages
    ) -> tuple[Visitor, RoutingRequest, bytes | None]:
        """Who asks, what is asked of the router, and the body that goes on (None: as it came).

        Raises:
            RefusedError: it may not go on.
            BadRequest: no engine could read it.
        """
        visitor = self._admission.visitor(request)
        parsed = self._parse(request)
        where = self._destination(visitor, parsed)
        pool = self._pools[where.pool]
        permitted = self._admission.workers(visitor, self._members(pool.name), self._subset(request))
        stages.mark(PARSE)
        normal = await self._normalize(request, parsed, pool, visitor.tenant)
        if normal is not None:
            stages.mark(NORMALIZE)
        goes_on = self._admission.body(visitor, where, request, None if normal is None else normal.body)
        ask = self._ask(request, parsed, where, visitor, goes_on)
        ask.subset = permitted
        ask.normalization = None if normal is None else normal.report
        await self._describe(ask, normal.request if normal else parsed, pool, stages)
        self._set_mode(ask, request)
        return visitor, ask, goes_on.body

    def _parse(self, request: HttpRequest) -> InferenceRequest | LoadOnly:
        if not request.body_seen:
            return LoadOnly("body-not-shown")
        return parse_request(request.method, request.path, request.headers, request.body)

    def _destination(self, visitor: Visitor, parsed: InferenceRequest | LoadOnly) -> Destination:
        try:
            return self._admission.destination(visitor, parsed.model)
        except RefusedError as error:
            if error.reject.status == 404:
                self._on_unknown_model()
            raise

    def _set_mode(self, ask: RoutingRequest, http: HttpRequest) -> None:
        """How far the decision about a request will be acted on."""
        key = ask.session_key or ask.request_id
        traffic = Traffic(http.headers, ask.tenant, ask.pool, ask.alias or ask.model, key)
        ask.mode, ask.traffic_class = self._rollout.of(traffic)
        if ask.mode is Mode.SHADOW:
            ask.policy = self._baseline

    def _endpoints_of(
        self, http: HttpRequest, decision: Decision, visitor: Visitor
    ) -> tuple[str, ...] | None:
        """What the gateway is told; None: it chooses."""
        if http.override is not None:
            members = self._members(decision.request.pool)
            allowed = {worker.endpoint for worker in members if visitor.policy.permits(worker)}
            return tuple(name for name in self._overridden(http.override) if name in allowed)
        if decision.request.mode is Mode.OBSERVE:
            return None
        return fallbacks(decision, self._fallback_count)

    async def _normalize(
        self, http: HttpRequest, parsed: InferenceRequest | LoadOnly, pool: PoolContext, tenant: str
    ) -> NormalizedRequest | None:
        """The request as it goes on; None when it goes on as it came, unseen."""
        if pool.normalizer is None or isinstance(parsed, LoadOnly):
            return None
        normal = await pool.normalizer.normalize(
            parsed, body=http.body, path=http.path, headers=http.headers, tenant=tenant
        )
        if normal.report is not None:
            counts = self.counters.normalization
            counts[normal.report.outcome] = counts.get(normal.report.outcome, 0) + 1
            if normal.body is not None:
                changes = self.counters.normalized
                for rule, count in normal.report.changes.items():
                    changes[rule] = changes.get(rule, 0) + count
        return normal

    def _ask(
        self,
        http: HttpRequest,
        parsed: InferenceRequest | LoadOnly,
        where: Destination,
        visitor: Visitor,
        goes_on: Body,
    ) -> RoutingRequest:
        """What is known of a request without its prompt."""
        pool = self._pools[where.pool]
        adapter = self._admission.catalog.adapter(pool.name, where.model)
        sent = parsed.cache_salt if isinstance(parsed, InferenceRequest) else None
        salt = goes_on.salt if goes_on.salt is not None else sent
        return RoutingRequest(
            request_id=http.request_id,
            model=where.model,
            pool=pool.name,
            namespace=Namespace(pool.model_revision, pool.tokenizer_revision, adapter, salt),
            prompt_tokens=len(http.body) // _BYTES_PER_TOKEN,
            alias=where.alias,
            tenant=visitor.tenant,
            template_version=pool.template_version,
            session_key=http.headers.get(self._session_header) or None,
            policy=None if self._policy_header is None else http.headers.get(self._policy_header),
            expected_output_tokens=_positive(http.headers.get(EXPECTED_OUTPUT_HEADER)),
            prompt_class=_prefix_class(http.headers.get(PREFIX_CLASS_HEADER)),
        )

    async def _describe(
        self, ask: RoutingRequest, parsed: InferenceRequest | LoadOnly, pool: PoolContext, stages: Stages
    ) -> None:
        """Add what the body says, and the token ids of its prompts."""
        if isinstance(parsed, LoadOnly):
            ask.load_only = parsed.reason
            return
        ask.max_output_tokens = parsed.max_output_tokens
        ask.sequences = parsed.sequences
        ask.stream = parsed.stream
        if ask.expected_output_tokens is None:
            ask.expected_output_tokens = _positive(parsed.body.get(EXPECTED_OUTPUT_FIELD))
        ask.session_key = ask.session_key or parsed.prompt_cache_key or parsed.user
        if pool.prompts is None:
            ask.load_only = "no-tokenizer"
            return
        encoded = await pool.prompts.encode(parsed, stages)
        if isinstance(encoded, LoadOnly):
            ask.load_only = encoded.reason
            return
        ask.prompts = encoded.prompts
        ask.prompt_tokens = sum(len(prompt) for prompt in encoded.prompts)
        ask.renditions = await self._renditions(parsed, pool)

    async def _renditions(self, parsed: InferenceRequest, pool: PoolContext) -> dict[str, Rendition]:
        """The prompts as other revisions encode them, as far as a worker serves one."""
        if not pool.revisions:
            return {}
        served = {state.revision for state in self._router.table.all() if state.member.pool == pool.name}
        found = {}
        for revision, (tokenizer_revision, prompts) in pool.revisions.items():
            if revision in served:
                encoded = await prompts.encode(parsed)
                ids = () if isinstance(encoded, LoadOnly) else encoded.prompts
                found[revision] = Rendition(tokenizer_revision, ids)
        return found

    def _subset(self, http: HttpRequest) -> frozenset[str] | None:
        if http.override is not None:
            return frozenset(self._overridden(http.override)[:1])
        return match_subset(http.subset, self._endpoints())

    def _overridden(self, override: str) -> tuple[str, ...]:
        """Members named by a conformance test, in its order."""
        members = set(self._endpoints())
        return tuple(part for name in override.split(",") if (part := name.strip()) in members)

    def _members(self, pool: str) -> Iterator[WorkerId]:
        return (state.id for state in self._router.table.all() if state.member.pool == pool)

    def _endpoints(self) -> list[str]:
        return [state.id.endpoint for state in self._router.table.all()]

    def _headers(self, decision: Decision) -> dict[str, str]:
        worker = decision.chosen.worker
        state = self._router.table.get(worker)
        if state is None or state.member.dp_size == 1:
            return {}
        return {DP_RANK_HEADER: str(worker.dp_rank)}

    def _rejected(self, reject: Reject) -> Reject:
        counts = self.counters.rejected
        counts[reject.why] = counts.get(reject.why, 0) + 1
        return reject


def _prefix_class(said: str | None) -> str:
    """A class as the client declares it; empty when it is none that we know."""
    word = (said or "").strip().lower()
    return word if word in _PREFIX_CLASSES else ""


_PREFIX_CLASSES = frozenset(PrefixClass)


def _positive(value: object) -> int | None:
    """A hint as a positive number; None when it is none. A hint is never a reason to refuse a request."""
    try:
        number = int(str(value)) if isinstance(value, (int, str)) and not isinstance(value, bool) else 0
    except ValueError:
        return None
    return number if 0 < number < 1 << 31 else None
