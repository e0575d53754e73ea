"""Values that cross layers. Immutable unless a docstring says otherwise.

Those that are made for every candidate are not frozen, though nobody changes them: making a frozen one takes
seven times as long.

Units are in the names or the docstrings: tokens, blocks, milliseconds (`_ms`), seconds (`now`, `age_s`).
`None` always means "not known"; it never means zero.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from extproc.core.namespace import Namespace
from extproc.core.rollout import Mode

if TYPE_CHECKING:
    from extproc.core.cost import CostSettings, RequestFacts, WorkerFacts

TokenIds: TypeAlias = "array[int]"
"""Token ids of one prompt: `array("I")`, 4 bytes each."""


class WorkerId(NamedTuple):
    """What we schedule: one engine core. `endpoint` is what Envoy dials (`ip:port`)."""

    endpoint: str
    dp_rank: int = 0

    def __str__(self) -> str:
        return self.endpoint if self.dp_rank == 0 else f"{self.endpoint}#{self.dp_rank}"


class Tier(IntEnum):
    """Where a KV block resides. Only GPU blocks are free to use; the others must be loaded back."""

    GPU = 0
    CPU = 1
    DISK = 2


# --- KV events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks an engine has just made reusable, in chain order.

    `block_hashes` and `parent` are the engine's own handles (int or bytes): opaque to us.
    `token_ids` holds `len(block_hashes) * block_size` tokens, or is empty when the engine did not say.
    `extra_keys` has one entry per block (or is None): what, besides tokens, went into the engine's hash.
    `chained`: the hashes are no handles but already links of our own chain, and there are no tokens (a
    simulated engine; nothing on the wire says so).
    """

    block_hashes: tuple[int | bytes, ...]
    parent: int | bytes | None
    token_ids: Sequence[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    tier: Tier = Tier.GPU
    group: int = 0
    spec_kind: str | None = None
    chained: bool = False


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks an engine no longer holds in `tier`. One event per physical copy: count references."""

    block_hashes: tuple[int | bytes, ...]
    tier: Tier = Tier.GPU
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine's whole prefix cache is gone."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


# --- what an engine's metrics page says ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HistogramTotals:
    """Sum (seconds) and count of a Prometheus histogram since the engine started."""

    sum_s: float
    count: float


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One engine (one data-parallel rank) at one scrape. None: the page did not say."""

    running: int | None = None
    waiting: int | None = None
    deferred: int | None = None  # of those waiting, for a grammar or for KV from elsewhere
    kv_usage: float | None = None  # share of KV blocks referenced by running requests, 0..1
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    ttft: HistogramTotals | None = None
    queue_time: HistogramTotals | None = None
    prefill_time: HistogramTotals | None = None
    inter_token: HistogramTotals | None = None
    model_name: str | None = None
    adapters: tuple[str, ...] = ()  # with requests running or waiting
    max_adapters: int | None = None  # that fit on the GPU at a time
    awake: bool | None = None  # False: it was put to sleep; requests wait until it is woken up

    @property
    def crowded(self) -> int:
        """Requests that wait for memory, a place in the batch or others' prefill."""
        return max(0, (self.waiting or 0) - (self.deferred or 0))


class Rendition(NamedTuple):
    """Prompts as another model revision renders and encodes them."""

    tokenizer_revision: str
    prompts: tuple[TokenIds, ...]


# --- requests, candidates, decisions ------------------------------------------------------------------


class Admitted(NamedTuple):
    """How a request came to be scheduled where requests may be held: after how long, with which priority."""

    held_ms: float
    priority: int


class Normalization(NamedTuple):
    """What normalization did to the body of a request.

    `outcome`: applied, dry-run (`changes` are what it would have done), unchanged, or skipped:REASON.
    `changes`: how many, by rule; see `extproc.prompt.normalize_text.Rule`.
    """

    outcome: str
    changes: Mapping[str, int]


@dataclass(slots=True)
class RoutingRequest:
    """One request as the router sees it.

    `prompts` holds one array of token ids per sequence the engine will run (a batch completion has
    several); it is empty when the request is routed by load only, and then `load_only` says why.
    `prompt_tokens` is the total over prompts (an estimate when `prompts` is empty).
    `chains`: where the block hashes are known beforehand, by block size: one chain per prompt, of the
    blocks it can hit. Then `prompts` is not needed.
    `session_key`: what the client says its session is; None: nothing.
    `session_hash`: 64 bits that stand for the session, where they are known beforehand; then neither
    `session_key` nor `prompts` is needed to find them.
    `policy`: the one to use, where the client may choose; None, or unknown to the router: its own.
    `expected_output_tokens`: what the client says it expects, per sequence; None: nothing. What is believed
    of it is bounded (`extproc.core.output_lengths`).
    `tenant`: whose request it is; empty: not known, or there are no tenants.
    `prompt_class`: what kind of prompt it is, as declared or learned; empty: not known.
    `normalization`: what became of its body; None: it is not wanted.
    `subset`: endpoints the gateway, or the tenant's permission, restricts us to; None = all.
    `alias`: the model name the client used, where that was one. `template_version`: names the chat template.
    `mode`: how far the decision is acted on, and `traffic_class`, the class that says so; empty: none.
    `renditions`: by model revision, where one among the pool's workers differs in more than its weights.
    `priority`: what its body asks for, the higher the sooner; None: nothing. `admission`: None: it could not
    have been held.
    """

    request_id: str
    model: str
    pool: str
    namespace: Namespace
    prompts: tuple[TokenIds, ...] = ()
    prompt_tokens: int = 0
    load_only: str | None = None
    max_output_tokens: int | None = None
    sequences: int = 1
    stream: bool = False
    subset: frozenset[str] | None = None
    chains: Mapping[int, tuple[tuple[int, ...], ...]] | None = None
    session_key: str | None = None
    session_hash: int | None = None
    policy: str | None = None
    expected_output_tokens: int | None = None
    renditions: Mapping[str, Rendition] = field(default_factory=dict)
    alias: str | None = None
    template_version: str = ""
    mode: Mode = Mode.ENFORCE
    traffic_class: str = ""
    tenant: str = ""
    prompt_class: str = ""
    normalization: Normalization | None = None
    priority: int | None = None
    admission: Admitted | None = None

    @property
    def keyed_prompts(self) -> int:
        """Number of prompts whose prefixes can be looked up; 0: routed by load only."""
        if self.prompts or not self.chains:
            return len(self.prompts)
        return max(map(len, self.chains.values()))


@dataclass(slots=True)  # not frozen: see the module
class CostBreakdown:
    """Predicted cost of one request on one worker, in milliseconds, by cause."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    kv_risk_ms: float

    @property
    def total_ms(self) -> float:
        """What candidates are ordered by."""
        return self.queue_ms + self.prefill_ms + self.decode_ms + self.kv_risk_ms

    @property
    def ttft_ms(self) -> float:
        """Predicted time to first token."""
        return self.queue_ms + self.prefill_ms


class LengthSource(StrEnum):
    """What an expected length rests on."""

    HINT = "hint"
    CLASS = "class"  # of prompts, of one tenant and model
    TENANT = "tenant"
    MODEL = "model"
    PRIOR = "prior"


class LengthEstimate(NamedTuple):
    """Tokens one sequence is expected to generate: the median, and what nine of ten stay within."""

    expected: float
    high: float
    source: LengthSource


class ShareFacts(NamedTuple):
    """Who takes a worker's time lately, as shares of it (see `extproc.core.engine_shares`).

    `warm` and `prefix` (the hash of its last block) are the request's, and the same on every worker.
    """

    warm: bool | None = None  # some worker holds most of the prompt; None: not known, routed by load
    prefix: int | None = None
    prefix_share: float = 0.0  # taken by requests with this prefix
    warm_share: float = 0.0  # by warm requests
    cold_prefill: float = 0.0  # by the prefill of cold ones
    cold_demand: float = 0.0  # by cold ones in all, mean of the workers
    cold_only: bool = False  # the worker is one of the cold pool


NO_SHARES = ShareFacts()


class Priced(NamedTuple):
    """What a candidate's price was made from: with the settings, all that `extproc.core.cost.price` takes."""

    request: "RequestFacts"
    worker: "WorkerFacts"


@dataclass(slots=True)  # not frozen: see the module
class Candidate:
    """One worker as it looked when the decision was made."""

    worker: WorkerId
    cached_tokens: int  # predicted prefix hit, GPU tier, summed over prompts
    offloaded_tokens: int  # predicted to be loadable from a slower tier, beyond `cached_tokens`
    uncovered_tokens: int  # prefill left to compute
    block_size: int | None  # tokens; None: not known, so no prefix can be claimed
    cost: CostBreakdown
    active: int  # our own unfinished requests there
    queued_prefill_tokens: float  # our own admitted prefill not yet computed
    metrics_age_s: float | None
    confidence: float = 1.0  # share of the predicted hit that the price counts on
    sequences: int = 0  # running there, ours and others'
    context_tokens: int = 0  # that our own sequences there hold
    doubtful_tokens: int = 0  # claimed beyond `cached_tokens`, and to be verified before it is predicted
    odds: float = 1.0  # share of `doubtful_tokens` that the price counts on
    position: int = 0  # among the candidates as the policy was given them: the order of membership
    priced: Priced | None = None
    shares: ShareFacts = NO_SHARES


class Reason(StrEnum):
    """Why the chosen worker was chosen. Used in the log, in spans and in metrics."""

    WARM_EXACT = "warm-exact"
    WARM_PARTIAL = "warm-partial"
    COLD_IDLE = "cold-idle"
    COLD_POOL = "cold-pool"  # to a worker that serves cold requests only
    COLD_BUSY = "cold-busy"
    TENANT_LIMIT = "tenant-limit"  # its tenant's cold requests may not be on more workers
    WARM_DENIED_WAIT = "warm-denied-wait"  # a warm worker was not worth its wait
    WARM_DENIED_SHARE = "warm-denied-share"  # the prefix, or all warm requests, had enough of a worker
    LOAD_ONLY = "load-only"
    ROUND_ROBIN = "round-robin"
    SESSION = "session"
    SESSION_MOVED = "session-moved"  # the session's worker had too much of our load


PolicyInputs: TypeAlias = tuple[tuple[str, str | float], ...]
"""What a policy used besides request, candidates, settings and chance, by name."""

NO_INPUTS: PolicyInputs = ()


@dataclass(frozen=True, slots=True)
class ShadowChoice:
    """What another policy would have chosen from the same candidates. It was not acted on."""

    policy: str
    chosen: Candidate
    reason: Reason
    inputs: PolicyInputs = NO_INPUTS


@dataclass(slots=True)  # not frozen: see the module
class Decision:
    """The answer, with everything needed to explain it and to make it again.

    `candidates` is in order of preference. `tie_seed` seeds the generator that policy and shadows were given.
    """

    lease_id: str
    request: RoutingRequest
    candidates: tuple[Candidate, ...]
    reason: Reason
    policy: str
    decided_at: float
    shadow: tuple[ShadowChoice, ...] = ()
    considered: int = 0  # candidates the policy was given
    tie_seed: int = 0
    inputs: PolicyInputs = NO_INPUTS
    costs: "CostSettings | None" = None
    output: LengthEstimate | None = None

    @property
    def chosen(self) -> Candidate:
        """The candidate the request was sent to."""
        return self.candidates[0]


class Outcome(StrEnum):
    """How a request ended, as far as its worker is concerned."""

    FINISHED = "finished"
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"  # the worker failed after accepting it
    REJECTED = "rejected"  # never reached a worker
    LOST = "lost"  # its end was never told: written off by the safety net, or because the router stopped


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a request. None: not reported."""

    outcome: Outcome
    served_by: str | None = None  # endpoint that really served it
    status: int | None = None
    attempts: int | None = None
    first_body_ms: float | None = None  # request received -> first response body byte
    upstream_first_body_ms: float | None = None  # request sent upstream -> first response body byte
    duration_ms: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    details: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


# --- membership -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """One engine server as discovery describes it. It hosts `dp_size` workers (data-parallel ranks).

    `dp_start_rank` is the number of its first rank; None: 0, or, if it has only one, what its metrics page
    says (see `extproc.core.dp_ranks`). `kv_events` and `kv_replay` are ZMQ endpoints for rank 0; rank r uses
    port + r. With `kv_bind` the engine connects to us: `kv_events` is then an address of ours. `revision` is
    the model revision it serves; None: as its pool says. `cold`: it serves cold requests only (see
    `extproc.core.share_bounds`).
    """

    endpoint: str
    pool: str = "default"
    dp_size: int = 1
    kv_events: str | None = None
    kv_replay: str | None = None
    kv_bind: bool = False
    revision: str | None = None
    cold: bool = False
    dp_start_rank: int | None = None

    def workers(self) -> tuple[WorkerId, ...]:
        """The workers this member hosts, by rank."""
        start = self.dp_start_rank or 0
        return tuple(WorkerId(self.endpoint, rank) for rank in range(start, start + self.dp_size))
