"""One request, from what Envoy sent to what is asked of the router: who asks, what for, and its token ids.

Whatever cannot be understood is asked for as a request that is routed by load, with the reason. Everything
that a client may say of itself in headers and fields of ours is a hint: none is a reason to refuse a request.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from extproc.adapters.admission import Admission, Body, Destination, RefusedError, Visitor
from extproc.adapters.prompt_normalizer import NormalizedRequest, PromptNormalizer
from extproc.adapters.prompt_service import PromptService
from extproc.adapters.routing import HttpRequest
from extproc.adapters.telemetry.stages import NORMALIZE, PARSE, Stages
from extproc.core.hashing import ChainKey
from extproc.core.namespace import Namespace, brief_salt
from extproc.core.prefix_classes import PrefixClass
from extproc.core.rollout import Mode, Rollout, Traffic
from extproc.core.types import Rendition, RoutingRequest, WorkerId
from extproc.core.worker_table import WorkerTable
from extproc.protocol.body_limits import BodyLimits
from extproc.protocol.endpoint_picker import match_subset
from extproc.protocol.hold_hints import body_priority
from extproc.protocol.openai import InferenceRequest, LoadOnly, parse_request
from extproc.protocol.prompt_size import estimated_tokens, estimated_unread

EXPECTED_OUTPUT_FIELD = "expected_output_tokens"
EXPECTED_OUTPUT_HEADER = "x-warmroute-expected-output-tokens"
PREFIX_CLASS_HEADER = "x-warmroute-prefix-class"
_LONGER_THAN_TEXT = "body-too-long"


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


class Prepared(NamedTuple):
    """Who asks, what is asked of the router, and the body that goes on (None: as it came)."""

    visitor: Visitor
    ask: RoutingRequest
    body: bytes | None


class RequestPreparation:
    """Prepares requests for a `Router`.

    Args:
        table: the router's workers; only looked at.
        pools: contexts by pool name, the default one first.
        admission: who may go where.
        rollout: how far decisions are acted on.
        baseline: the policy that decides in mode shadow.
        session_header: request header that names the session.
        policy_header: request header that may choose the policy; None: none may.
        body_limits: how much of a body is read.
        on_unknown_model: told when a model was refused that no pool is known to serve.
        on_normalized: told what normalization made of a request.
    """

    def __init__(
        self,
        table: WorkerTable,
        pools: Mapping[str, PoolContext],
        admission: Admission,
        *,
        rollout: Rollout,
        baseline: str | None,
        session_header: str,
        policy_header: str | None,
        body_limits: BodyLimits,
        on_unknown_model: Callable[[], None],
        on_normalized: Callable[[NormalizedRequest], None],
    ) -> None:
        self._table = table
        self._pools = pools
        self._admission = admission
        self._rollout = rollout
        self._baseline = baseline
        self._session_header = session_header.lower()
        self._policy_header = None if policy_header is None else policy_header.lower()
        self._body_limits = body_limits
        self._on_unknown_model = on_unknown_model
        self._on_normalized = on_normalized
        self._block_sizes: dict[str, int] = {}  # of each pool, as a worker there had it last

    async def prepare(self, request: HttpRequest, stages: Stages) -> Prepared:
        """Read, admit, normalize and encode a request.

        Raises:
            RefusedError: it may not go on.
            BadRequest: no engine could read it.
        """
        visitor = self._admission.visitor(request)
        parsed = self._parse(request)
        where = self._destination(visitor, parsed)
        pool = self._pools[where.pool]
        permitted = self._admission.workers(visitor, self.members(pool.name), self._subset(request))
        stages.mark(PARSE)
        normal = await self._normalize(request, parsed, pool, visitor.tenant)
        if normal is not None:
            stages.mark(NORMALIZE)
        goes_on = self._admission.body(visitor, where, request, None if normal is None else normal.body)
        ask = self._ask(request, parsed, where, visitor, goes_on)
        ask.subset = permitted
        ask.normalization = None if normal is None else normal.report
        described = normal.request if normal else parsed
        if where.alias is not None and isinstance(described, InferenceRequest):
            described = replace(described, model=where.model, body={**described.body, "model": where.model})
        await self._describe(ask, described, pool, stages)
        if ask.load_only is not None and not ask.prompt_tokens:
            ask.prompt_tokens = _estimated(request, parsed)
        self._set_mode(ask, request)
        return Prepared(visitor, ask, goes_on.body)

    def block_size_is(self, pool: str, tokens: int) -> None:
        """A worker of a pool has blocks of so many tokens: long prompts are hashed in advance for it."""
        self._block_sizes[pool] = tokens

    def overridden(self, override: str) -> tuple[str, ...]:
        """Members named by a conformance test, in its order."""
        members = set(self._endpoints())
        return tuple(part for name in override.split(",") if (part := name.strip()) in members)

    def members(self, pool: str) -> Iterator[WorkerId]:
        """Workers of a pool, ready or not."""
        return (state.id for state in self._table.all() if state.member.pool == pool)

    # --- inside ------------------------------------------------------------------------------------

    def _parse(self, request: HttpRequest) -> InferenceRequest | LoadOnly:
        if not request.body_seen:
            return LoadOnly("body-not-shown")
        return parse_request(request.method, request.path, request.headers, request.body, self._body_limits)

    def _destination(self, visitor: Visitor, parsed: InferenceRequest | LoadOnly) -> Destination:
        try:
            return self._admission.destination(visitor, parsed.model)
        except RefusedError as error:
            if error.reject.status == 404:
                self._on_unknown_model()
            raise

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
            self._on_normalized(normal)
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
            namespace=Namespace(
                pool.model_revision,
                pool.tokenizer_revision,
                adapter,
                None if salt is None else brief_salt(salt),
            ),
            prompt_tokens=0,
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
        ask.priority = body_priority(parsed.body)
        if pool.prompts is None:
            ask.load_only = "no-tokenizer"
            return
        size = self._block_sizes.get(ask.pool)
        chain = None if size is None else ChainKey(size, ask.namespace.seed)
        encoded = await pool.prompts.encode(parsed, stages, chain)
        if isinstance(encoded, LoadOnly):
            ask.load_only = encoded.reason
            return
        ask.prompt_tokens = sum(len(prompt) for prompt in encoded.prompts)
        if not parsed.reads_cache:  # a hit that is predicted would be held against the worker
            ask.load_only = "prompt-logprobs"
            return
        ask.prompts, ask.chains = encoded.prompts, dict(encoded.chains) or None
        ask.renditions = await self._renditions(parsed, pool)

    async def _renditions(self, parsed: InferenceRequest, pool: PoolContext) -> dict[str, Rendition]:
        """The prompts as other revisions encode them, as far as a worker serves one."""
        if not pool.revisions:
            return {}
        served = {state.revision for state in self._table.all() if state.member.pool == pool.name}
        found = {}
        for revision, (tokenizer_revision, prompts) in pool.revisions.items():
            if revision in served:
                encoded = await prompts.encode(parsed)
                ids = () if isinstance(encoded, LoadOnly) else encoded.prompts
                found[revision] = Rendition(tokenizer_revision, ids)
        return found

    def _set_mode(self, ask: RoutingRequest, http: HttpRequest) -> None:
        """How far the decision about a request will be acted on."""
        key = ask.session_key or ask.request_id
        traffic = Traffic(http.headers, ask.tenant, ask.pool, ask.alias or ask.model, key)
        ask.mode, ask.traffic_class = self._rollout.of(traffic)
        if ask.mode is Mode.SHADOW:
            ask.policy = self._baseline

    def _subset(self, http: HttpRequest) -> frozenset[str] | None:
        if http.override is not None:
            return frozenset(self.overridden(http.override)[:1])
        return None if http.subset is None else match_subset(http.subset, self._endpoints())

    def _endpoints(self) -> list[str]:
        return [state.id.endpoint for state in self._table.all()]


def _estimated(http: HttpRequest, parsed: InferenceRequest | LoadOnly) -> int:
    """Prompt tokens where their ids are not known."""
    if isinstance(parsed, InferenceRequest):
        return estimated_tokens(parsed)
    is_text = parsed.reason != _LONGER_THAN_TEXT
    return estimated_unread(len(http.body), http.headers.get("content-type", ""), is_text=is_text)


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
