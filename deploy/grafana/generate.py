"""Writes warmroute.json, the Grafana dashboard, from the table of its panels; `--check` only compares."""  # noqa: INP001

# Not a package: nothing here is installed.

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "warmroute.json"
WIDTH, HEIGHT = 24, 8
POOL = 'pool=~"$pool"'
CLASS = f'{POOL}, prompt_class=~"$prompt_class"'
RATE = "[$__rate_interval]"
US = "and on (instance) warmroute_build_info"  # among all processes that are scraped


@dataclass(frozen=True)
class Panel:
    """One graph. `queries`: legend to PromQL. `stacked` is for parts of a whole."""

    title: str
    meaning: str
    unit: str
    queries: dict[str, str]
    stacked: bool = False
    width: int = 8


def total(by: str, name: str, labels: str = POOL) -> str:
    """Events per second."""
    return f"sum by ({by}) (rate({name}{{{labels}}}{RATE}))"


def share(part: str, whole: str) -> str:
    """One sum of rates by another."""
    return f"{part} / {whole}"


def quantiles(name: str, by: str, labels: str = POOL, *shares: float) -> dict[str, str]:
    """Quantiles of a histogram, a query for each share."""
    legend = "".join(f" {{{{{label}}}}}" for label in by.split(", ") if label)
    grouped = ", ".join(part for part in ("le", by) if part)
    return {
        f"p{share * 100:g}{legend}": (
            f"histogram_quantile({share:g}, sum by ({grouped}) (rate({name}_bucket{{{labels}}}{RATE})))"
        )
        for share in shares or (0.5, 0.95)
    }


def worker(name: str) -> dict[str, str]:
    """A gauge of workers, as the replica that sees the highest value."""
    return {"{{worker}}": f"max by (worker) ({name}{{{POOL}}})"}


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Requests by outcome",
            "Requests that have ended. `lost`: nobody told how.",
            "reqps",
            {"{{outcome}}": total("outcome", "warmroute_requests_total", CLASS)},
            stacked=True,
        ),
        Panel(
            "Time to first token by warmth",
            "Of streamed requests, from their arrival. Warm: all but less than a block was cached.",
            "s",
            quantiles("warmroute_ttft_seconds", "warmth", CLASS),
        ),
        Panel(
            "End-to-end time",
            "As the gateway measures it.",
            "s",
            quantiles("warmroute_request_duration_seconds", "", CLASS, 0.5, 0.95, 0.99),
        ),
        Panel(
            "Time to first token by prompt class (p95)",
            "System template, document, session, RAG set: as declared or learned.",
            "s",
            quantiles("warmroute_ttft_seconds", "prompt_class", CLASS, 0.95),
        ),
        Panel(
            "Time limits, retries, losses",
            "Share of requests that ended in a time limit of the gateway; attempts beyond the first, and "
            "requests whose end nobody told, per request.",
            "percentunit",
            {
                "time limits": share(
                    total("", "warmroute_timeouts_total"), total("", "warmroute_requests_total")
                ),
                "retries": share(total("", "warmroute_retries_total"), total("", "warmroute_requests_total")),
                "lost": share(
                    total("", "warmroute_leases_lost_total"), total("", "warmroute_requests_total")
                ),
            },
        ),
        Panel(
            "Refused by us",
            "Requests answered by Warmroute itself, and why.",
            "reqps",
            {"{{why}}": "sum by (why) (rate(warmroute_rejections_total[$__rate_interval]))"},
        ),
    ],
    "Cache": [
        Panel(
            "Prompt tokens, cached and not",
            "As engines report them; unknown where they do not.",
            "short",
            {"{{cache}}": total("cache", "warmroute_input_tokens_total", CLASS)},
            stacked=True,
        ),
        Panel(
            "Prefill computed per prompt token",
            "1 is a cold fleet; by model pool and prompt class.",
            "percentunit",
            {
                "{{pool}} {{prompt_class}}": share(
                    total("pool, prompt_class", "warmroute_prefill_computed_tokens_total", CLASS),
                    total("pool, prompt_class", "warmroute_prefill_cold_tokens_total", CLASS),
                )
            },
        ),
        Panel(
            "Prefill saved",
            "Tokens a second that cold caches would have had to compute, and engines had to.",
            "short",
            {
                "from cold caches": total("", "warmroute_prefill_cold_tokens_total", CLASS),
                "computed": total("", "warmroute_prefill_computed_tokens_total", CLASS),
            },
        ),
        Panel(
            "Requests with a warm worker",
            "Taken: sent there. Denied: not worth its wait. Passed: another was cheaper.",
            "reqps",
            {"{{result}}": total("result", "warmroute_warm_requests_total", CLASS)},
            stacked=True,
        ),
        Panel(
            "KV evictions",
            "Blocks evicted from GPU memory.",
            "short",
            {"{{pool}}": total("pool", "warmroute_kv_evictions_total")},
        ),
        Panel(
            "Age of what was evicted",
            "Since it was stored; of one block in sixteen. Young: the cache is too small for its load.",
            "s",
            quantiles("warmroute_kv_evicted_age_seconds", "pool"),
        ),
    ],
    "Rollout": [
        Panel(
            "Requests by mode",
            "Enforce: we choose. Shadow: the baseline does. Observe: Envoy does.",
            "reqps",
            {"{{mode}}": total("mode", "warmroute_decisions_total")},
            stacked=True,
        ),
        Panel(
            "Time to first token by mode",
            "",
            "s",
            quantiles("warmroute_ttft_seconds", "mode", CLASS),
        ),
        Panel(
            "Prefill computed per prompt token by mode",
            "",
            "percentunit",
            {
                "{{mode}}": share(
                    total("mode", "warmroute_prefill_computed_tokens_total", CLASS),
                    total("mode", "warmroute_prefill_cold_tokens_total", CLASS),
                )
            },
        ),
    ],
    "Decisions": [
        Panel(
            "Reasons",
            "Why the chosen worker was chosen.",
            "reqps",
            {"{{policy}}: {{reason}}": total("policy, reason", "warmroute_decisions_total")},
            stacked=True,
        ),
        Panel(
            "Predicted wait by reason (p95)",
            "At the chosen worker, before prefill begins.",
            "s",
            quantiles("warmroute_queue_wait_seconds", "reason", CLASS, 0.95),
        ),
        Panel(
            "Time of a decision by stage (p99)",
            "`total` is what Envoy waits for us.",
            "s",
            quantiles("warmroute_decision_duration_seconds", "stage", 'instance=~".*"', 0.99),
        ),
        Panel(
            "Routed by load alone",
            "And what kept us from more.",
            "reqps",
            {"{{cause}}": total("cause", "warmroute_load_only_total")},
            stacked=True,
        ),
        Panel(
            "Shadow policies: regret",
            "Predicted seconds of cost, per second, by which their choices were cheaper or dearer.",
            "short",
            {"{{policy}} {{result}}": total("policy, result", "warmroute_shadow_regret_seconds_total")},
        ),
        Panel(
            "Shadow policies: choices",
            "The same worker, or one that is cheaper or dearer in prediction.",
            "reqps",
            {"{{policy}} {{result}}": total("policy, result", "warmroute_shadow_decisions_total")},
        ),
    ],
    "Predictions": [
        Panel(
            "Error of predicted time to first token",
            "How far it was off, early and late.",
            "s",
            quantiles("warmroute_ttft_prediction_error_seconds", "direction"),
        ),
        Panel(
            "Predicted cached tokens",
            "Exact; over: fewer were cached; under: more were.",
            "reqps",
            {"{{result}}": total("result", "warmroute_predictions_total")},
            stacked=True,
        ),
        Panel(
            "Cached tokens, found by predicted",
            "1 is a perfect prediction.",
            "percentunit",
            {
                "{{pool}}": share(
                    total("pool", "warmroute_cached_tokens_actual_total"),
                    total("pool", "warmroute_cached_tokens_predicted_total"),
                )
            },
        ),
        Panel(
            "Relative error of predicted time to first token",
            "Of the last requests. Bias above 0: predicted too long.",
            "percentunit",
            {
                "{{pool}} {{figure}}": (
                    f"avg by (pool, figure) (warmroute_pool_ttft_prediction_error_ratio{{{POOL}}})"
                )
            },
        ),
        Panel(
            "Divergence",
            "Workers whose predictions keep failing, by the likely cause.",
            "short",
            {"{{worker}} {{cause}}": f"max by (worker, cause) (warmroute_worker_diverging{{{POOL}}})"},
        ),
        Panel(
            "Trust",
            "Share of a predicted hit that the price counts on.",
            "percentunit",
            {"{{worker}}": f"min by (worker) (warmroute_worker_trust_ratio{{{POOL}}})"},
        ),
        Panel(
            "Learned prefill time per 1,000 tokens",
            "Attention aside.",
            "s",
            {"{{pool}}": f"1000 * max by (pool) (warmroute_pool_prefill_seconds_per_token{{{POOL}}})"},
        ),
        Panel(
            "Learned fixed time to first token",
            "Of an empty prompt on an idle worker.",
            "s",
            {"{{pool}}": f"max by (pool) (warmroute_pool_ttft_overhead_seconds{{{POOL}}})"},
        ),
    ],
    "Workers": [
        Panel(
            "Our requests",
            "Routed and not known to have ended.",
            "short",
            worker("warmroute_worker_active_requests"),
        ),
        Panel(
            "Queued prefill",
            "How long computing what was sent there is predicted to take.",
            "s",
            worker("warmroute_worker_queued_prefill_seconds"),
        ),
        Panel(
            "Requests sent there",
            "",
            "reqps",
            {"{{worker}}": total("worker", "warmroute_worker_requests_total")},
            stacked=True,
        ),
        Panel(
            "Engines: running and waiting",
            "As the engines themselves tell Prometheus.",
            "short",
            {
                "{{instance}} running": "sum by (instance) (vllm:num_requests_running)",
                "{{instance}} waiting": "sum by (instance) (vllm:num_requests_waiting)",
            },
        ),
        Panel(
            "Engines: KV memory in use",
            "By running requests.",
            "percentunit",
            {"{{instance}}": "max by (instance) (vllm:kv_cache_usage_perc)"},
        ),
        Panel(
            "Engines: prefix cache hits",
            "Share of prompt tokens, as the engines count them.",
            "percentunit",
            {
                "{{instance}}": share(
                    f"sum by (instance) (rate(vllm:prefix_cache_hits_total{RATE}))",
                    f"sum by (instance) (rate(vllm:prefix_cache_queries_total{RATE}))",
                )
            },
        ),
        Panel(
            "Engines: preemptions",
            "Running requests put back for lack of KV memory.",
            "short",
            {"{{instance}}": f"sum by (instance) (rate(vllm:num_preemptions_total{RATE}))"},
        ),
        Panel(
            "Requests of others",
            "Running and waiting there, not sent by us.",
            "short",
            {
                "{{worker}} {{state}}": (
                    f"max by (worker, state) (warmroute_worker_foreign_requests{{{POOL}}})"
                )
            },
        ),
        Panel(
            "Ready workers",
            "",
            "short",
            {"{{pool}} {{state}}": f"min by (pool, state) (warmroute_workers{{{POOL}}})"},
        ),
    ],
    "Signals": [
        Panel("Age of engines' metrics", "", "s", worker("warmroute_worker_metrics_age_seconds")),
        Panel(
            "KV events complete",
            "1: every event has been seen.",
            "short",
            {"{{worker}}": f"min by (worker) (warmroute_worker_kv_events_complete{{{POOL}}})"},
        ),
        Panel(
            "KV events: lag and age",
            "From making to applying, by both machines' clocks; and since the last one.",
            "s",
            {
                "{{worker}} lag": f"max by (worker) (warmroute_worker_kv_event_lag_seconds{{{POOL}}})",
                "{{worker}} age": f"max by (worker) (warmroute_worker_kv_event_age_seconds{{{POOL}}})",
            },
        ),
        Panel(
            "KV events: gaps, replays, resets",
            "",
            "short",
            {
                "gaps {{worker}}": total("worker", "warmroute_worker_kv_gaps_total"),
                "replays {{worker}}": total("worker", "warmroute_worker_kv_replays_total"),
                "resets {{worker}}": total("worker", "warmroute_worker_kv_resets_total"),
            },
        ),
        Panel(
            "Leases",
            "Requests routed and not known to have ended.",
            "short",
            {"{{instance}}": "warmroute_leases"},
        ),
        Panel(
            "Oldest lease",
            "",
            "s",
            {"{{instance}}": "warmroute_oldest_lease_seconds"},
        ),
        Panel(
            "Access log streams",
            "At 0, ends of requests are lost.",
            "short",
            {"{{instance}}": "warmroute_access_log_streams"},
        ),
        Panel(
            "Memory",
            "Of the process, and of its index of KV blocks (estimated).",
            "bytes",
            {
                "{{instance}} process": f"process_resident_memory_bytes {US}",
                "{{instance}} index": "warmroute_index_memory_bytes",
            },
        ),
        Panel(
            "Processor time",
            "Of the process; one core is 1.",
            "short",
            {"{{instance}}": f"rate(process_cpu_seconds_total{RATE}) {US}"},
        ),
    ],
}

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = number = 0
    for row, graphs in ROWS.items():
        number += 1
        panels.append(
            {
                "type": "row",
                "id": number,
                "title": row,
                "collapsed": False,
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
                "panels": [],
            }
        )
        top += 1
        left = 0
        for graph in graphs:
            if left + graph.width > WIDTH:
                left, top = 0, top + HEIGHT
            number += 1
            position = {"h": HEIGHT, "w": graph.width, "x": left, "y": top}
            panels.append(_panel(graph, number, position))
            left += graph.width
        top += HEIGHT
    return {
        "uid": "warmroute",
        "title": "Warmroute",
        "description": "Where requests go, what caches save, and what the router knows.",
        "tags": ["warmroute", "envoy", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(graph: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {
        "lineWidth": 1,
        "fillOpacity": 30 if graph.stacked else 5,
        "showPoints": "never",
    }
    if graph.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "type": "timeseries",
        "id": number,
        "title": graph.title,
        "description": graph.meaning,
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": graph.unit, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "exemplar": True,
            }
            for at, (legend, query) in enumerate(graph.queries.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    def choice(name: str, label: str, metric: str) -> dict[str, Any]:
        query = f"label_values({metric}, {name})"
        return {
            "type": "query",
            "name": name,
            "label": label,
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
            "refresh": 2,
            "sort": 1,
        }

    return [
        {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
        choice("pool", "Pool", "warmroute_workers"),
        choice("prompt_class", "Prompt class", "warmroute_requests_total"),
    ]


def main(arguments: list[str]) -> int:
    """Write, or with `--check` report a difference. Returns the exit code."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" in arguments:
        if not FILE.exists() or FILE.read_text(encoding="utf-8") != text:
            print(
                "deploy/grafana/warmroute.json is old: run python deploy/grafana/generate.py", file=sys.stderr
            )
            return 1
        return 0
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
