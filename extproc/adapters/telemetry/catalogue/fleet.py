"""What is known of the workers and their pools."""

from collections.abc import Sequence

from extproc.adapters.telemetry.metric import (
    BLOCK,
    ONE,
    REQUEST,
    SECOND,
    TOKEN,
    WORKER,
    Metric,
    counter,
    gauge,
)

WORKERS = gauge("warmroute_workers", "{worker}", "Members of a pool, ready and not-ready.", ("pool", "state"))
WORKERS_FULL = gauge(
    "warmroute_workers_full",
    "{worker}",
    "Ready workers without room for another request, by what fills them; where requests are held.",
    ("pool", "why"),
)
WORKER_READY = gauge(
    "warmroute_worker_ready", ONE, "1 if requests go there that any worker may serve.", WORKER
)
WORKER_LAST_RESORT = gauge(
    "warmroute_worker_last_resort",
    ONE,
    "1 if that is only because no worker of the pool is ready: its /metrics fails, or it is asleep.",
    WORKER,
)
WORKER_ACTIVE = gauge("warmroute_worker_active_requests", REQUEST, "Our unfinished requests there.", WORKER)
WORKER_SEQUENCES = gauge("warmroute_worker_sequences", "{sequence}", "Sequences of those requests.", WORKER)
WORKER_CONTEXT = gauge("warmroute_worker_context_tokens", TOKEN, "Tokens of context they hold.", WORKER)
WORKER_QUEUED = gauge(
    "warmroute_worker_queued_prefill_tokens", TOKEN, "Prefill sent there and not computed yet.", WORKER
)
WORKER_QUEUE_SECONDS = gauge(
    "warmroute_worker_queued_prefill_seconds", SECOND, "How long computing it is predicted to take.", WORKER
)
WORKER_ENGINE = gauge(
    "warmroute_worker_engine_requests",
    REQUEST,
    "Requests the engine reports, running and waiting.",
    (*WORKER, "state"),
)
WORKER_FOREIGN = gauge(
    "warmroute_worker_foreign_requests",
    REQUEST,
    "Requests there that are not ours, running and waiting.",
    (*WORKER, "state"),
)
WORKER_KV_USAGE = gauge(
    "warmroute_worker_kv_usage_ratio", ONE, "Share of KV blocks in use by running requests.", WORKER
)
WORKER_SCRAPE_AGE = gauge(
    "warmroute_worker_metrics_age_seconds",
    SECOND,
    "Age of the engine's figures; since it joined before the first.",
    WORKER,
)
WORKER_SCRAPE_FAILURES = gauge(
    "warmroute_worker_scrape_failures", "{scrape}", "Scrapes that have failed in a row.", WORKER
)
WORKER_BLOCKS = gauge(
    "warmroute_worker_kv_blocks",
    BLOCK,
    "KV blocks held there: told by events, or assumed.",
    (*WORKER, "source"),
)
WORKER_ORPHANS = gauge(
    "warmroute_worker_kv_orphan_blocks",
    BLOCK,
    "KV blocks kept aside because their parent is not known.",
    WORKER,
)
WORKER_UNKNOWN_REMOVES = gauge(
    "warmroute_worker_kv_unknown_removals",
    BLOCK,
    "Removals of blocks that were not known: events are missing.",
    WORKER,
)
WORKER_COMPLETE = gauge(
    "warmroute_worker_kv_events_complete",
    ONE,
    "1 if every KV event has been seen; absent where events are off.",
    WORKER,
)
WORKER_SUSPENDED = gauge(
    "warmroute_worker_kv_suspended",
    ONE,
    "1 while KV events count for nothing: the engine may be another one.",
    WORKER,
)
WORKER_EVENT_AGE = gauge("warmroute_worker_kv_event_age_seconds", SECOND, "Since the last KV event.", WORKER)
WORKER_EVENT_LAG = gauge(
    "warmroute_worker_kv_event_lag_seconds",
    SECOND,
    "From making to applying of the last live KV message, by the clocks of both machines.",
    WORKER,
)
WORKER_MESSAGES = counter("warmroute_worker_kv_messages", "{message}", "KV messages applied.", WORKER)
WORKER_GAPS = counter(
    "warmroute_worker_kv_gaps", "{gap}", "Holes found in the sequence of KV messages.", WORKER
)
WORKER_REPLAYS = counter(
    "warmroute_worker_kv_replays", "{replay}", "Questions to the replay endpoint.", WORKER
)
WORKER_RESETS = counter(
    "warmroute_worker_kv_resets", "{reset}", "Times that all was forgotten and learned anew.", WORKER
)
WORKER_TRUST = gauge(
    "warmroute_worker_trust_ratio",
    ONE,
    "Share of predicted hits that happened lately; the price counts on it.",
    WORKER,
)
WORKER_DIVERGING = gauge(
    "warmroute_worker_diverging",
    ONE,
    "1 while predictions keep failing, with the likely cause; else 0, and the cause is `none`.",
    (*WORKER, "cause"),
)
WORKER_DOUBTFUL = gauge(
    "warmroute_worker_kv_doubtful_blocks",
    BLOCK,
    "KV blocks that have to be verified before they are believed: events were lost.",
    WORKER,
)
WORKER_ROUTED = counter("warmroute_worker_requests", REQUEST, "Requests sent there.", WORKER)
POOL_OVERHEAD = gauge(
    "warmroute_pool_ttft_overhead_seconds",
    SECOND,
    "Learned time to first token of an empty prompt on an idle worker.",
    ("pool",),
)
POOL_PREFILL = gauge(
    "warmroute_pool_prefill_seconds_per_token",
    "s/{token}",
    "Learned time of one token's prefill, attention aside.",
    ("pool",),
)
POOL_REUSE = gauge(
    "warmroute_pool_reuse_ratio", ONE, "Share of prompt tokens found cached lately.", ("pool",)
)
POOL_TTFT_ERROR = gauge(
    "warmroute_pool_ttft_prediction_error_ratio",
    ONE,
    "Errors of predicted times to first token lately, as shares of the actual time: their median (bias; "
    "above 0: predicted too long), and the median and 90th percentile of their size.",
    ("pool", "figure"),
)
POOL_LEARNED = gauge(
    "warmroute_pool_ttft_learned",
    ONE,
    "1 if those times are learned, 0 while they are the configured ones.",
    ("pool",),
)

FLEET_METRICS: Sequence[Metric] = (
    WORKERS, WORKERS_FULL, WORKER_READY, WORKER_LAST_RESORT, WORKER_ROUTED, WORKER_ACTIVE, WORKER_SEQUENCES,
    WORKER_CONTEXT, WORKER_QUEUED, WORKER_QUEUE_SECONDS, WORKER_ENGINE, WORKER_FOREIGN, WORKER_KV_USAGE,
    WORKER_SCRAPE_AGE, WORKER_SCRAPE_FAILURES, WORKER_BLOCKS, WORKER_ORPHANS, WORKER_UNKNOWN_REMOVES,
    WORKER_COMPLETE, WORKER_SUSPENDED, WORKER_EVENT_AGE, WORKER_EVENT_LAG, WORKER_MESSAGES, WORKER_GAPS,
    WORKER_REPLAYS, WORKER_RESETS, WORKER_TRUST, WORKER_DIVERGING, WORKER_DOUBTFUL, POOL_OVERHEAD,
    POOL_PREFILL, POOL_REUSE, POOL_LEARNED, POOL_TTFT_ERROR,
)  # fmt: skip
"""Read when somebody asks."""
