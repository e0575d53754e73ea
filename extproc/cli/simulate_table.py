"""The table that `warmroute simulate` prints."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from extproc.sim.results import Result, knees, load_name

_LOADS = ("rate", "concurrency")
_COLUMNS: tuple[tuple[str, Callable[[Result], Any], str], ...] = (
    ("TTFT p50", lambda r: r["ttft_ms"]["p50"], "ms"),
    ("p95", lambda r: r["ttft_ms"]["p95"], "ms"),
    ("p99", lambda r: r["ttft_ms"]["p99"], "ms"),
    ("TPOT p50", lambda r: r["tpot_ms"]["p50"], "ms"),
    ("session p50", lambda r: r["rollout_ms"]["p50"], "s"),
    ("p99", lambda r: r["rollout_ms"]["p99"], "s"),
    ("tok/s", lambda r: r["output_tok_s"], ""),
    ("cached", lambda r: r["cached_token_share"], "%"),
    ("CV", lambda r: r["decode_blocks_cv"], ""),
    ("failed", lambda r: r["failed"], ""),
)
LEGEND = (
    "TTFT, TPOT: ms; sessions: s; cached: share of prompt tokens; CV: how unevenly decoding load is spread "
    "over the engines (0: evenly)"
)
"""What the columns are."""


def results_table(results: Sequence[Result]) -> Table:
    """One row per policy and load. Times in ms, but sessions in seconds."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    loads = [name for name in _LOADS if any(name in r for r in results)]
    for name in (*loads, *(head for head, _, _ in _COLUMNS)):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        cells = [f"{result[name]:g}" for name in loads]
        cells += [_shown(value(result), unit) for _, value, unit in _COLUMNS]
        table.add_row(result["policy"], *cells)
    return table


def knee_lines(results: Sequence[Result], knee_ttft_ms: float) -> Iterator[str]:
    """Up to which load each policy copes, for those that ran under several: what `knees` finds, in words."""
    for knee in knees(results, knee_ttft_ms):
        name = load_name(knee)
        load = None if name is None else knee[name]
        what = "with none of these loads" if load is None else f"up to {name} {load:g}"
        yield f"{knee['policy']} copes {what} (TTFT p95 within {knee_ttft_ms:g} ms, nothing failed)"


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "%":
        return f"{value:.1%}"
    if unit == "s":
        value /= 1000.0
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
