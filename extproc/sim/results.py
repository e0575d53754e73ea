"""From what was measured to the figures of a report.

One result per policy and load, plain values only, so that it can cross a process and become JSON:

    {"policy", "rate" | "concurrency", "ttft_ms": {"p50", "p95", "p99", "mean"}, "tpot_ms": {…},
     "e2e_ms": {…}, "rollout_ms": {…}, "output_tok_s", "cached_token_share", "decode_blocks_cv", "failed", …}

A figure that has no samples is null. `ttft_ms`, `e2e_ms`: as the client sees them. `cached_token_share`:
prompt tokens found in a prefix cache, of all prompt tokens. `decode_blocks_cv`: coefficient of variation over
the replicas of the KV blocks held by decoding sequences, mean over 0.5 s bins in which there were any.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from extproc.sim.measures import Measures, curve_ms, times_ms

GOOD_TTFT_S = 5.0
"""Of each group, `good` requests had their first token within this."""

Result = dict[str, Any]
"""See the module's docstring; `plots` holds what only figures need."""


def result_of(policy: str, measures: Measures, load: Mapping[str, float]) -> Result:
    """The figures of one run. `load`: what was offered, by name (`rate` or `concurrency`)."""
    began = measures.ended if measures.began is None else measures.began
    duration = measures.ended - began
    prompt, cached = sum(measures.prompt.values()), sum(measures.cached.values())
    return {
        "policy": policy,
        **load,
        "ttft_ms": times_ms(measures.ttft),
        "tpot_ms": times_ms(measures.tpot),
        "e2e_ms": times_ms(measures.e2e),
        "rollout_ms": times_ms(measures.rollout),
        "output_tok_s": _ratio(measures.output_tokens, duration, 2),
        "cached_token_share": _ratio(cached, prompt, 6),
        "decode_blocks_cv": _ratio(measures.cv_sum, measures.cv_bins, 6),
        "failed": measures.failed,
        "requests": measures.requests,
        "sessions": len(measures.rollout),
        "duration_s": round(duration, 6),
        "requests_s": _ratio(len(measures.ttft), duration, 4),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": measures.output_tokens,
        "preemptions": measures.preemptions,
        "failures": dict(sorted(measures.failures.items())),
        "requests_by_worker": list(measures.sent),
        "groups": _groups(measures),
        "plots": {
            "ttft_cdf": curve_ms(measures.ttft),
            "load": _rows(measures.load.rows),
            "load_width_s": measures.load.width_s,
        },
    }


def report_of(results: Iterable[Result], about: Mapping[str, Any], knee_ttft_ms: float) -> dict[str, Any]:
    """What `--json` writes: `about` (workload, replicas, seed, …), the results, and the knees.

    The knee of a policy is the highest load at which p95 of the time to first token stayed within
    `knee_ttft_ms` and nothing failed, with no lower load beyond it. It needs at least two loads.
    """
    every = list(results)
    return {
        **about,
        "results": [{name: value for name, value in r.items() if name != "plots"} for r in every],
        "knee_ttft_p95_ms": knee_ttft_ms,
        "knees": knees(every, knee_ttft_ms),
    }


def load_name(result: Result) -> str | None:
    """What load the result's run was offered: "rate", "concurrency", or None for the workload's own."""
    return next((name for name in ("rate", "concurrency") if name in result), None)


def within(result: Result, knee_ttft_ms: float) -> bool:
    """Whether the fleet coped with the load."""
    p95 = result["ttft_ms"]["p95"]
    return p95 is not None and p95 <= knee_ttft_ms and not result["failed"]


def knees(results: Sequence[Result], knee_ttft_ms: float) -> list[dict[str, Any]]:
    """The knee of each policy that was run under several loads; null if it coped with none of them."""
    out: list[dict[str, Any]] = []
    for policy in dict.fromkeys(r["policy"] for r in results):
        mine = [r for r in results if r["policy"] == policy]
        name = load_name(mine[0])
        if name is None or len({r[name] for r in mine}) < 2:
            continue
        knee: float | None = None
        for result in sorted(mine, key=lambda r: r[name]):
            if not within(result, knee_ttft_ms):
                break
            knee = result[name]
        out.append({"policy": policy, name: knee})
    return out


def _groups(measures: Measures) -> dict[str, Any]:
    """Figures by statistics class, where there are several."""
    if len(measures.groups) < 2:
        return {}
    out: dict[str, Any] = {}
    for name, index in measures.groups.items():
        samples = [t for t, g in zip(measures.ttft, measures.group, strict=True) if g == index]
        out[name] = {
            "requests": len(samples),
            "ttft_ms": times_ms(samples),
            "cached_token_share": _ratio(measures.cached[name], measures.prompt[name], 6),
            "failed": measures.failed_by.get(name, 0),
            "good": sum(sample <= GOOD_TTFT_S for sample in samples),
        }
    return out


def _ratio(above: float, below: float, digits: int) -> float | None:
    return round(above / below, digits) if below else None


def _rows(rows: Sequence[Sequence[float]]) -> list[list[int]]:
    return [[round(value) for value in row] for row in rows]
