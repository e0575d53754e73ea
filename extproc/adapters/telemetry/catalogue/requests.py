"""What is counted as requests are routed and end, and as KV events come."""

from collections.abc import Sequence

from extproc.adapters.telemetry import stages
from extproc.adapters.telemetry.metric import (
    AGES,
    BLOCK,
    CLASS,
    MODE,
    ONE,
    REQUEST,
    SECOND,
    SHORT,
    TOKEN,
    Metric,
    counter,
    histogram,
)

# --- when a request is routed ---------------------------------------------------------------------------

DECISIONS = counter(
    "warmroute_decisions",
    REQUEST,
    "Requests decided about, by policy and by its reason; `mode` says how far that was acted on: enforce, "
    "shadow (the baseline was), observe (the gateway chose).",
    ("pool", "policy", "reason", "mode"),
)
REJECTIONS = counter("warmroute_rejections", REQUEST, "Requests refused by us, and why.", ("why",))
ADMISSIONS = counter(
    "warmroute_admissions",
    REQUEST,
    "Requests that may be held: `passed` (there was room), `admitted` (after a wait), `refused` (too many "
    "wait, or too long), `expired` (waited as long as they may), `left` (the client did).",
    ("pool", "tenant", "outcome"),
)
HELD_SECONDS = histogram(
    "warmroute_admission_wait_seconds",
    "How long requests were held, by how that ended.",
    ("pool", "outcome"),
)
LOAD_ONLY = counter(
    "warmroute_load_only",
    REQUEST,
    "Requests routed by load alone, and what kept us from more.",
    ("pool", "cause"),
)
NORMALIZED = counter(
    "warmroute_normalized_requests",
    REQUEST,
    "Requests by what normalization made of them: applied, dry-run, unchanged, or skipped and why.",
    ("pool", "outcome"),
)
NORMALIZATION_CHANGES = counter(
    "warmroute_normalization_changes",
    ONE,
    "What normalization changed, or in a dry run would have, by rule.",
    ("pool", "outcome", "rule"),
)
DECISION_SECONDS = histogram(
    "warmroute_decision_duration_seconds",
    f"Time of a decision by stage: {', '.join(stages.STAGES)}; `{stages.TOTAL}` is all of it.",
    ("stage",),
    SHORT,
)
WARM_REQUESTS = counter(
    "warmroute_warm_requests",
    REQUEST,
    "Requests of which some worker held a prefix: `taken` (sent to such a one), `denied` (it was not worth "
    "its wait) or `passed` (another was cheaper).",
    (*CLASS, "result"),
)
QUEUE_WAIT = histogram(
    "warmroute_queue_wait_seconds",
    "Predicted wait at the chosen worker before prefill begins, by reason of the choice.",
    (*CLASS, "reason"),
)
SHADOW_DECISIONS = counter(
    "warmroute_shadow_decisions",
    REQUEST,
    "What a shadow policy would have chosen: the `same` worker, or one `cheaper` or `dearer` in prediction.",
    ("pool", "policy", "result"),
)
SHADOW_REGRET = counter(
    "warmroute_shadow_regret_seconds",
    SECOND,
    "Predicted cost by which a shadow policy's choices were `cheaper` than ours (our regret), or `dearer`.",
    ("pool", "policy", "result"),
)

# --- when a request has ended ---------------------------------------------------------------------------

REQUESTS = counter(
    "warmroute_requests",
    REQUEST,
    "Requests that have ended, and how: finished, cancelled (the client left), failed (the worker), rejected "
    "(no worker was reached), lost (no signal came).",
    ("model", *CLASS, "outcome"),
)
TIMEOUTS = counter(
    "warmroute_timeouts", REQUEST, "Requests that ended in a time limit of the gateway.", CLASS
)
RETRIES = counter("warmroute_retries", REQUEST, "Attempts beyond the first.", ("pool",))
LEASES_LOST = counter(
    "warmroute_leases_lost", REQUEST, "Requests whose end nobody told; their load was written off.", ("pool",)
)
REQUEST_SECONDS = histogram(
    "warmroute_request_duration_seconds",
    "End-to-end time of a request as the gateway measures it.",
    (*CLASS, "outcome"),
)
TTFT = histogram(
    "warmroute_ttft_seconds",
    "Time to first token of streamed requests, from their arrival, by how much of the prompt was cached: "
    "warm (all but less than a block), partial, cold.",
    (*CLASS, "warmth", MODE),
)
TTFT_ERROR = histogram(
    "warmroute_ttft_prediction_error_seconds",
    "How far the predicted time to first token was off: the first token came `early` or `late`.",
    ("pool", "direction"),
)
INPUT_TOKENS = counter(
    "warmroute_input_tokens",
    TOKEN,
    "Prompt tokens of requests that ended, as the engine reported them: cached, uncached, or unknown (it did "
    "not say).",
    ("model", *CLASS, "cache"),
)
OUTPUT_TOKENS = counter("warmroute_output_tokens", TOKEN, "Generated tokens reported.", ("model", *CLASS))
COLD_TOKENS = counter(
    "warmroute_prefill_cold_tokens",
    TOKEN,
    "Prefill that served requests would have needed from cold caches: their prompt tokens.",
    (*CLASS, MODE),
)
PREFILL_TOKENS = counter(
    "warmroute_prefill_computed_tokens",
    TOKEN,
    "Prefill that served requests needed: prompt tokens the engine did not find cached (predicted where it "
    "does not say). Divided by `warmroute_prefill_cold_tokens_total`: prefill computed per input token.",
    (*CLASS, MODE),
)
PREDICTIONS = counter(
    "warmroute_predictions",
    REQUEST,
    "Predicted against reported cached tokens: exact, over (fewer were cached), under (more were).",
    ("pool", "result"),
)
CACHED_PREDICTED = counter(
    "warmroute_cached_tokens_predicted",
    TOKEN,
    "Cached tokens predicted, where the engine reported them.",
    ("pool",),
)
CACHED_ACTUAL = counter(
    "warmroute_cached_tokens_actual",
    TOKEN,
    "Cached tokens reported, where they had been predicted.",
    ("pool",),
)

# --- KV events ------------------------------------------------------------------------------------------

EVICTIONS = counter("warmroute_kv_evictions", BLOCK, "KV blocks evicted from GPU memory.", ("pool",))
EVICTED_AGE = histogram(
    "warmroute_kv_evicted_age_seconds",
    "Time from storing to evicting a KV block, of one block in sixteen.",
    ("pool",),
    AGES,
)

REQUEST_METRICS: Sequence[Metric] = (
    DECISIONS, REJECTIONS, ADMISSIONS, HELD_SECONDS, LOAD_ONLY, NORMALIZED, NORMALIZATION_CHANGES,
    DECISION_SECONDS, WARM_REQUESTS, QUEUE_WAIT, SHADOW_DECISIONS, SHADOW_REGRET, REQUESTS, TIMEOUTS,
    RETRIES, LEASES_LOST, REQUEST_SECONDS, TTFT, TTFT_ERROR, INPUT_TOKENS, OUTPUT_TOKENS, COLD_TOKENS,
    PREFILL_TOKENS, PREDICTIONS, CACHED_PREDICTED, CACHED_ACTUAL, EVICTIONS, EVICTED_AGE,
)  # fmt: skip
"""Counted as requests and events come."""
