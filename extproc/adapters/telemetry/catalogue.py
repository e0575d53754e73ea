"""Every metric there is: the exporters, the reference and the checks of dashboard and alerts read this table.

Names are those of the Prometheus exposition without `_total`, which it adds to counters; OTLP carries them as
they stand here, so that a collector that turns OTLP into Prometheus gives the same series. Times are seconds.

Every label has few values, whatever clients send: models are those the engines serve, classes of prompts the
first `MAX_VALUES` seen, and workers the members; anything beyond is `other`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from extproc.adapters.telemetry import stages

MAX_VALUES = 64


class Kind(StrEnum):
    """As in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: see the module.
        kind: counter, gauge or histogram.
        unit: UCUM, as OpenTelemetry wants it.
        meaning: one sentence for its HELP line.
        labels: in order.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name in the Prometheus exposition (for a histogram, of its family)."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series in Prometheus."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}{part}" for part in ("_bucket", "_count", "_sum"))
        return (self.exposed,)


REQUEST, TOKEN, BLOCK, SECOND, BYTE, ONE = "{request}", "{token}", "{block}", "s", "By", "1"

_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)

WORKER = ("pool", "worker")
CLASS = ("pool", "prompt_class")
MODE = "mode"


def _counter(name: str, unit: str, meaning: str, labels: tuple[str, ...]) -> Metric:
    return Metric(name, Kind.COUNTER, unit, meaning, labels)


def _gauge(name: str, unit: str, meaning: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, Kind.GAUGE, unit, meaning, labels)


def _histogram(
    name: str, meaning: str, labels: tuple[str, ...], buckets: tuple[float, ...] = _LONG
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, SECOND, meaning, labels, buckets)


# --- when a request is routed ---------------------------------------------------------------------------

DECISIONS = _counter(
    "warmroute_decisions",
    REQUEST,
    "Requests decided about, by policy and by its reason; `mode` says how far that was acted on: enforce, "
    "shadow (the baseline was), observe (the gateway chose).",
    ("pool", "policy", "reason", "mode"),
)
REJECTIONS = _counter("warmroute_rejections", REQUEST, "Requests refused by us, and why.", ("why",))
LOAD_ONLY = _counter(
    "warmroute_load_only",
    REQUEST,
    "Requests routed by load alone, and what kept us from more.",
    ("pool", "cause"),
)
NORMALIZED = _counter(
    "warmroute_normalized_requests",
    REQUEST,
    "Requests by what normalization made of them: applied, dry-run, unchanged, or skipped and why.",
    ("pool", "outcome"),
)
NORMALIZATION_CHANGES = _counter(
    "warmroute_normalization_changes",
    ONE,
    "What normalization changed, or in a dry run would have, by rule.",
    ("pool", "outcome", "rule"),
)
DECISION_SECONDS = _histogram(
    "warmroute_decision_duration_seconds",
    f"Time of a decision by stage: {', '.join(stages.STAGES)}; `{stages.TOTAL}` is all of it.",
    ("stage",),
    _SHORT,
)
WARM_REQUESTS = _counter(
    "warmroute_warm_requests",
    REQUEST,
    "Requests of which some worker held a prefix: `taken` (sent to such a one), `denied` (it was not worth "
    "its wait) or `passed` (another was cheaper).",
    (*CLASS, "result"),
)
QUEUE_WAIT = _histogram(
    "warmroute_queue_wait_seconds",
    "Predicted wait at the chosen worker before prefill begins, by reason of the choice.",
    (*CLASS, "reason"),
)
SHADOW_DECISIONS = _counter(
    "warmroute_shadow_decisions",
    REQUEST,
    "What a shadow policy would have chosen: the `same` worker, or one `cheaper` or `dearer` in prediction.",
    ("pool", "policy", "result"),
)
SHADOW_REGRET = _counter(
    "warmroute_shadow_regret_seconds",
    SECOND,
    "Predicted cost by which a shadow policy's choices were `cheaper` than ours (our regret), or `dearer`.",
    ("pool", "policy", "result"),
)

# --- when a request has ended ---------------------------------------------------------------------------

REQUESTS = _counter(
    "warmroute_requests",
    REQUEST,
    "Requests that have ended, and how: finished, cancelled (the client left), failed (the worker), rejected "
    "(no worker was reached), lost (no signal came).",
    ("model", *CLASS, "outcome"),
)
TIMEOUTS = _counter(
    "warmroute_timeouts", REQUEST, "Requests that ended in a time limit of the gateway.", CLASS
)
RETRIES = _counter("warmroute_retries", REQUEST, "Attempts beyond the first.", ("pool",))
LEASES_LOST = _counter(
    "warmroute_leases_lost", REQUEST, "Requests whose end nobody told; their load was written off.", ("pool",)
)
REQUEST_SECONDS = _histogram(
    "warmroute_request_duration_seconds",
    "End-to-end time of a request as the gateway measures it.",
    (*CLASS, "outcome"),
)
TTFT = _histogram(
    "warmroute_ttft_seconds",
    "Time to first token of streamed requests, from their arrival, by how much of the prompt was cached: "
    "warm (all but less than a block), partial, cold.",
    (*CLASS, "warmth", MODE),
)
TTFT_ERROR = _histogram(
    "warmroute_ttft_prediction_error_seconds",
    "How far the predicted time to first token was off: the first token came `early` or `late`.",
    ("pool", "direction"),
)
INPUT_TOKENS = _counter(
    "warmroute_input_tokens",
    TOKEN,
    "Prompt tokens of requests that ended, as the engine reported them: cached, uncached, or unknown (it did "
    "not say).",
    ("model", *CLASS, "cache"),
)
OUTPUT_TOKENS = _counter("warmroute_output_tokens", TOKEN, "Generated tokens reported.", ("model", *CLASS))
COLD_TOKENS = _counter(
    "warmroute_prefill_cold_tokens",
    TOKEN,
    "Prefill that served requests would have needed from cold caches: their prompt tokens.",
    (*CLASS, MODE),
)
PREFILL_TOKENS = _counter(
    "warmroute_prefill_computed_tokens",
    TOKEN,
    "Prefill that served requests needed: prompt tokens the engine did not find cached (predicted where it "
    "does not say). Divided by `warmroute_prefill_cold_tokens_total`: prefill computed per input token.",
    (*CLASS, MODE),
)
PREDICTIONS = _counter(
    "warmroute_predictions",
    REQUEST,
    "Predicted against reported cached tokens: exact, over (fewer were cached), under (more were).",
    ("pool", "result"),
)
CACHED_PREDICTED = _counter(
    "warmroute_cached_tokens_predicted",
    TOKEN,
    "Cached tokens predicted, where the engine reported them.",
    ("pool",),
)
CACHED_ACTUAL = _counter(
    "warmroute_cached_tokens_actual",
    TOKEN,
    "Cached tokens reported, where they had been predicted.",
    ("pool",),
)

# --- KV events ------------------------------------------------------------------------------------------

EVICTIONS = _counter("warmroute_kv_evictions", BLOCK, "KV blocks evicted from GPU memory.", ("pool",))
EVICTED_AGE = _histogram(
    "warmroute_kv_evicted_age_seconds",
    "Time from storing to evicting a KV block, of one block in sixteen.",
    ("pool",),
    _AGES,
)

# --- what is, when somebody asks ------------------------------------------------------------------------

BUILD = _gauge(
    "warmroute_build_info", ONE, "Always 1; the version that runs, and the policy.", ("version", "policy")
)
WORKERS = _gauge(
    "warmroute_workers", "{worker}", "Members of a pool, ready and not-ready.", ("pool", "state")
)
LEASES = _gauge("warmroute_leases", REQUEST, "Requests routed and not known to have ended.")
OLDEST_LEASE = _gauge("warmroute_oldest_lease_seconds", SECOND, "Age of the oldest of them; 0 without any.")
ACCESS_LOG_STREAMS = _gauge(
    "warmroute_access_log_streams",
    "{stream}",
    "Open streams of Envoy's access log; at 0, ends of requests are lost.",
)
ACCESS_LOG_ENTRIES = _counter(
    "warmroute_access_log_entries", "{entry}", "Entries received, and foreign ones.", ("kind",)
)
STREAMS = _gauge("warmroute_ext_proc_streams", "{stream}", "Open ext_proc streams.")
PASSED = _counter(
    "warmroute_ext_proc_passed_through", REQUEST, "Requests left to the gateway's own balancing.", ()
)
ERRORS = _counter(
    "warmroute_ext_proc_errors",
    REQUEST,
    "Requests left to the gateway's own balancing by a fault: routing, answer (not sendable), protocol.",
    ("kind",),
)
INDEX_BLOCKS = _gauge("warmroute_index_blocks", BLOCK, "Distinct KV blocks known on any worker.")
INDEX_BYTES = _gauge("warmroute_index_memory_bytes", BYTE, "Memory of the index of KV blocks, estimated.")

WORKER_READY = _gauge("warmroute_worker_ready", ONE, "1 if requests may go there.", WORKER)
WORKER_ACTIVE = _gauge("warmroute_worker_active_requests", REQUEST, "Our unfinished requests there.", WORKER)
WORKER_SEQUENCES = _gauge("warmroute_worker_sequences", "{sequence}", "Sequences of those requests.", WORKER)
WORKER_CONTEXT = _gauge("warmroute_worker_context_tokens", TOKEN, "Tokens of context they hold.", WORKER)
WORKER_QUEUED = _gauge(
    "warmroute_worker_queued_prefill_tokens", TOKEN, "Prefill sent there and not computed yet.", WORKER
)
WORKER_QUEUE_SECONDS = _gauge(
    "warmroute_worker_queued_prefill_seconds", SECOND, "How long computing it is predicted to take.", WORKER
)
WORKER_ENGINE = _gauge(
    "warmroute_worker_engine_requests",
    REQUEST,
    "Requests the engine reports, running and waiting.",
    (*WORKER, "state"),
)
WORKER_FOREIGN = _gauge(
    "warmroute_worker_foreign_requests",
    REQUEST,
    "Requests there that are not ours, running and waiting.",
    (*WORKER, "state"),
)
WORKER_KV_USAGE = _gauge(
    "warmroute_worker_kv_usage_ratio", ONE, "Share of KV blocks in use by running requests.", WORKER
)
WORKER_SCRAPE_AGE = _gauge(
    "warmroute_worker_metrics_age_seconds",
    SECOND,
    "Age of the engine's figures; since it joined before the first.",
    WORKER,
)
WORKER_SCRAPE_FAILURES = _gauge(
    "warmroute_worker_scrape_failures", "{scrape}", "Scrapes that have failed in a row.", WORKER
)
WORKER_BLOCKS = _gauge(
    "warmroute_worker_kv_blocks",
    BLOCK,
    "KV blocks held there: told by events, or assumed.",
    (*WORKER, "source"),
)
WORKER_ORPHANS = _gauge(
    "warmroute_worker_kv_orphan_blocks",
    BLOCK,
    "KV blocks kept aside because their parent is not known.",
    WORKER,
)
WORKER_UNKNOWN_REMOVES = _gauge(
    "warmroute_worker_kv_unknown_removals",
    BLOCK,
    "Removals of blocks that were not known: events are missing.",
    WORKER,
)
WORKER_COMPLETE = _gauge(
    "warmroute_worker_kv_events_complete",
    ONE,
    "1 if every KV event has been seen; absent where events are off.",
    WORKER,
)
WORKER_SUSPENDED = _gauge(
    "warmroute_worker_kv_suspended",
    ONE,
    "1 while KV events count for nothing: the engine may be another one.",
    WORKER,
)
WORKER_EVENT_AGE = _gauge("warmroute_worker_kv_event_age_seconds", SECOND, "Since the last KV event.", WORKER)
WORKER_EVENT_LAG = _gauge(
    "warmroute_worker_kv_event_lag_seconds",
    SECOND,
    "From making to applying of the last live KV message, by the clocks of both machines.",
    WORKER,
)
WORKER_MESSAGES = _counter("warmroute_worker_kv_messages", "{message}", "KV messages applied.", WORKER)
WORKER_GAPS = _counter(
    "warmroute_worker_kv_gaps", "{gap}", "Holes found in the sequence of KV messages.", WORKER
)
WORKER_REPLAYS = _counter(
    "warmroute_worker_kv_replays", "{replay}", "Questions to the replay endpoint.", WORKER
)
WORKER_RESETS = _counter(
    "warmroute_worker_kv_resets", "{reset}", "Times that all was forgotten and learned anew.", WORKER
)
WORKER_TRUST = _gauge(
    "warmroute_worker_trust_ratio",
    ONE,
    "Share of predicted hits that happened lately; the price counts on it.",
    WORKER,
)
WORKER_DIVERGING = _gauge(
    "warmroute_worker_diverging",
    ONE,
    "1 while predictions keep failing, with the likely cause; else 0, and the cause is `none`.",
    (*WORKER, "cause"),
)
WORKER_DOUBTFUL = _gauge(
    "warmroute_worker_kv_doubtful_blocks",
    BLOCK,
    "KV blocks that have to be verified before they are believed: events were lost.",
    WORKER,
)
WORKER_ROUTED = _counter("warmroute_worker_requests", REQUEST, "Requests sent there.", WORKER)

POOL_OVERHEAD = _gauge(
    "warmroute_pool_ttft_overhead_seconds",
    SECOND,
    "Learned time to first token of an empty prompt on an idle worker.",
    ("pool",),
)
POOL_PREFILL = _gauge(
    "warmroute_pool_prefill_seconds_per_token",
    "s/{token}",
    "Learned time of one token's prefill, attention aside.",
    ("pool",),
)
POOL_REUSE = _gauge(
    "warmroute_pool_reuse_ratio", ONE, "Share of prompt tokens found cached lately.", ("pool",)
)
POOL_TTFT_ERROR = _gauge(
    "warmroute_pool_ttft_prediction_error_ratio",
    ONE,
    "Errors of predicted times to first token lately, as shares of the actual time: their median (bias; "
    "above 0: predicted too long), and the median and 90th percentile of their size.",
    ("pool", "figure"),
)
POOL_LEARNED = _gauge(
    "warmroute_pool_ttft_learned",
    ONE,
    "1 if those times are learned, 0 while they are the configured ones.",
    ("pool",),
)

REQUEST_METRICS: Sequence[Metric] = (
    DECISIONS, REJECTIONS, LOAD_ONLY, NORMALIZED, NORMALIZATION_CHANGES, DECISION_SECONDS, WARM_REQUESTS,
    QUEUE_WAIT, SHADOW_DECISIONS,
    SHADOW_REGRET, REQUESTS, TIMEOUTS, RETRIES, LEASES_LOST, REQUEST_SECONDS, TTFT, TTFT_ERROR,
    INPUT_TOKENS, OUTPUT_TOKENS, COLD_TOKENS, PREFILL_TOKENS, PREDICTIONS, CACHED_PREDICTED, CACHED_ACTUAL,
    EVICTIONS, EVICTED_AGE,
)  # fmt: skip
"""Counted as requests and events come."""

STATE_METRICS: Sequence[Metric] = (
    BUILD, WORKERS, LEASES, OLDEST_LEASE, ACCESS_LOG_STREAMS, ACCESS_LOG_ENTRIES, STREAMS, PASSED, ERRORS,
    INDEX_BLOCKS, INDEX_BYTES,
    WORKER_READY, WORKER_ROUTED, WORKER_ACTIVE, WORKER_SEQUENCES, WORKER_CONTEXT, WORKER_QUEUED,
    WORKER_QUEUE_SECONDS, WORKER_ENGINE, WORKER_FOREIGN, WORKER_KV_USAGE, WORKER_SCRAPE_AGE,
    WORKER_SCRAPE_FAILURES, WORKER_BLOCKS, WORKER_ORPHANS, WORKER_UNKNOWN_REMOVES, WORKER_COMPLETE,
    WORKER_SUSPENDED, WORKER_EVENT_AGE, WORKER_EVENT_LAG, WORKER_MESSAGES, WORKER_GAPS, WORKER_REPLAYS,
    WORKER_RESETS, WORKER_TRUST, WORKER_DIVERGING, WORKER_DOUBTFUL,
    POOL_OVERHEAD, POOL_PREFILL, POOL_REUSE, POOL_LEARNED, POOL_TTFT_ERROR,
)  # fmt: skip
"""Read when somebody asks."""

METRICS: Sequence[Metric] = (*REQUEST_METRICS, *STATE_METRICS)
