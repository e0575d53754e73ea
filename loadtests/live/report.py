"""What was measured, as rows: for JSON, Markdown and the terminal. Pure.

Every comparison is against something in the same run: added latency against the same requests without a proxy
in the same round, throughput against Envoy alone, cached tokens and TTFT against Envoy's round robin.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtests.live.load import Throughput
from loadtests.live.quality import Run
from loadtests.live.schedule import Latency


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """One target under one load: medians over rounds. Milliseconds, requests per second.

    `added_*` are above the direct row of the same round. `throughput_ratio` is against Envoy alone.
    None: not measured, or nothing succeeded.
    """

    target: str
    load: str
    p50_ms: float | None
    p95_ms: float | None
    added_p50_ms: float | None
    added_p95_ms: float | None
    per_second: float | None
    throughput_ratio: float | None
    requests: int
    failed: int
    command: str


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One target on one workload: medians over repetitions. `ttft_*_ratio` are against round robin."""

    target: str
    workload: str
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    cached_share: float | None
    ttft_p50_ratio: float | None
    ttft_p95_ratio: float | None
    wall_s: float | None
    requests: int
    failed: int
    cached_shares: tuple[float, ...]  # of each repetition
    command: str


@dataclass(frozen=True, slots=True)
class Slice:
    """One target under one load in one round."""

    latency: Latency | None
    throughput: Throughput | None


def overhead_rows(
    slices: "dict[tuple[str, str], list[Slice]]", commands: dict[str, str], direct: str, envoy: str
) -> list[OverheadRow]:
    """Rows from slices by (load, target), in their order; `slices[...][i]` is round i of each."""
    rows = []
    for (load, target), rounds in slices.items():
        base = slices.get((load, direct), [])
        envoy_rate = _median(
            one.throughput.per_second for one in slices.get((load, envoy), []) if one.throughput
        )
        rate = _median(one.throughput.per_second for one in rounds if one.throughput)
        pairs = [
            (one.latency, other.latency)
            for one, other in zip(rounds, base, strict=False)
            if one.latency and other.latency
        ]
        latencies = [one.latency for one in rounds if one.latency]
        rows.append(
            OverheadRow(
                target=target,
                load=load,
                p50_ms=_median(one.p50 for one in latencies),
                p95_ms=_median(one.p95 for one in latencies),
                added_p50_ms=_median(mine.p50 - theirs.p50 for mine, theirs in pairs),
                added_p95_ms=_median(mine.p95 - theirs.p95 for mine, theirs in pairs),
                per_second=rate,
                throughput_ratio=rate / envoy_rate if rate is not None and envoy_rate else None,
                requests=sum(one.requests for one in latencies),
                failed=sum(one.failed for one in latencies)
                + sum(one.throughput.failed for one in rounds if one.throughput),
                command=commands.get(target, ""),
            )
        )
    return rows


def quality_rows(
    runs: "dict[tuple[str, str], list[Run]]", commands: dict[str, str], baseline: str
) -> list[QualityRow]:
    """Rows from repetitions by (workload, target), in their order."""
    rows = []
    for (workload, target), repetitions in runs.items():
        base = runs.get((workload, baseline), [])
        p50, p95 = (_median(run.ttft(share) for run in repetitions) for share in (0.5, 0.95))
        base50, base95 = (_median(run.ttft(share) for run in base) for share in (0.5, 0.95))
        shares = tuple(round(run.cached_share, 4) for run in repetitions if run.cached_share is not None)
        rows.append(
            QualityRow(
                target=target,
                workload=workload,
                ttft_p50_ms=p50,
                ttft_p95_ms=p95,
                cached_share=_median(shares),
                ttft_p50_ratio=p50 / base50 if p50 is not None and base50 else None,
                ttft_p95_ratio=p95 / base95 if p95 is not None and base95 else None,
                wall_s=_median(run.wall_s for run in repetitions),
                requests=sum(len(run.ttft_ms) + len(run.failures) for run in repetitions),
                failed=sum(len(run.failures) for run in repetitions),
                cached_shares=shares,
                command=commands.get(target, ""),
            )
        )
    return rows


def document(
    about: dict[str, Any],
    overhead: Sequence[OverheadRow],
    quality: Sequence[QualityRow],
    skipped: Sequence[str],
) -> dict[str, Any]:
    """The JSON report."""
    return {
        **about,
        "overhead": [asdict(row) for row in overhead],
        "quality": [asdict(row) for row in quality],
        "skipped": list(skipped),
    }


OVERHEAD_HEAD = ("target", "added p50, ms", "added p95, ms", "max req/s", "of Envoy's", "failed")
QUALITY_HEAD = (
    "target",
    "cached tokens",
    "TTFT p50, ms",
    "p95, ms",
    "p50 of round robin's",
    "p95 of round robin's",
    "failed",
)


def overhead_cells(row: OverheadRow) -> list[str]:
    """One row as text, under `OVERHEAD_HEAD`."""
    return [
        row.target,
        _text(row.added_p50_ms, "{:+.2f}"),
        _text(row.added_p95_ms, "{:+.2f}"),
        _text(row.per_second, "{:.0f}"),
        _text(row.throughput_ratio, "{:.2f}"),
        f"{row.failed} of {row.requests}" if row.failed else "0",
    ]


def quality_cells(row: QualityRow) -> list[str]:
    """One row as text, under `QUALITY_HEAD`."""
    return [
        row.target,
        _text(row.cached_share, "{:.1%}"),
        _text(row.ttft_p50_ms, "{:.0f}"),
        _text(row.ttft_p95_ms, "{:.0f}"),
        _text(row.ttft_p50_ratio, "{:.2f}"),
        _text(row.ttft_p95_ratio, "{:.2f}"),
        f"{row.failed} of {row.requests}" if row.failed else "0",
    ]


def markdown(
    about: dict[str, Any],
    overhead: Sequence[OverheadRow],
    quality: Sequence[QualityRow],
    skipped: Sequence[str],
) -> str:
    """The same as Markdown, with the command behind every row."""
    lines = [f"{about['date']}, {about['machine']}: `{about['command']}`", ""]
    for load in dict.fromkeys(row.load for row in overhead):
        lines += [f"**Prompts of {load}** (max req/s: {about['throughput_tool']})", ""]
        lines += _table(OVERHEAD_HEAD, [overhead_cells(row) for row in overhead if row.load == load])
    for workload in dict.fromkeys(row.workload for row in quality):
        lines += [f"**{workload}**, {about['engines']}", ""]
        lines += _table(QUALITY_HEAD, [quality_cells(row) for row in quality if row.workload == workload])
    commands = dict.fromkeys((row.target, row.command) for row in overhead)
    commands |= dict.fromkeys((row.target, row.command) for row in quality)
    lines += [f"- {target}: `{command}`" for target, command in commands]
    lines += [f"- skipped: {reason}" for reason in skipped]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [*("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)), ""]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
