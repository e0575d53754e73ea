"""What was measured, as rows: for JSON, Markdown and the terminal. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtests.restarts.evaluate import (
    LIMIT_POINTS,
    LIMIT_S,
    Dip,
    Noise,
    Period,
    Timeline,
    noise,
)
from loadtests.restarts.play import JUDGED, Load, Run

LEAD_S = 5  # seconds shown before the first stop


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Shares from 0 to 1, `None` where nothing was sent; seconds from the first stop on.

    Attributes:
        during: share from the first stop until the last router listens.
        after: from then on.
        down_s: from each stop until that router listened again.
        complete_s: from then until it followed all KV events without a gap; None: not before the end.
        passed_by: requests that no router placed.
        by_second: shares from `LEAD_S` before the period on.
    """

    scenario: str
    round: int
    dip: Dip
    during: float | None
    after: float | None
    down_s: tuple[float, ...]
    complete_s: tuple[float | None, ...]
    requests: int
    failed: int
    passed_by: int
    by_second: tuple[float | None, ...]

    @property
    def kept(self) -> bool:
        """No request lost, and the share as it should be."""
        return self.failed == 0 and self.dip.within


@dataclass(frozen=True, slots=True)
class Report:
    """All runs, and the noise they have to be seen against."""

    noise: Noise
    rows: tuple[Row, ...]
    failures: tuple[str, ...]
    requests: int
    failed: int

    @property
    def kept(self) -> bool:
        """No request was lost at any time, and no judged scenario lost too much."""
        return not self.failed and all(row.kept for row in self.rows if row.scenario in JUDGED)


def report(load: Load, runs: Sequence[Run], decided: set[str]) -> Report:
    """From what was sent, when routers were restarted, and the requests that routers placed."""
    timeline = Timeline(load.samples)
    controls = {run.round: run.period for run in runs if run.scenario == "control"}
    seen = noise(timeline, list(controls.values()))
    rows = [
        _row(load, timeline, run, timeline.share(controls[run.round]) or 0.0, seen.width_s, decided)
        for run in runs
    ]
    return Report(
        seen, tuple(rows), tuple(text for _, text in load.failures), len(load.sent), len(load.failures)
    )


def _row(load: Load, timeline: Timeline, run: Run, baseline: float, width_s: float, decided: set[str]) -> Row:
    period = run.period
    during = after = None
    if run.restarts:
        ready = max(restart.ready_at for restart in run.restarts)
        during = timeline.share(Period(period.begin, ready))
        after = timeline.share(Period(ready, period.end))
    shown = Period(period.begin - LEAD_S, period.end)
    inside = {one for one, at in load.sent.items() if period.begin <= at < period.end}
    return Row(
        run.scenario,
        run.round,
        timeline.dip(period, baseline, width_s),
        during,
        after,
        tuple(restart.ready_at - restart.stop_at for restart in run.restarts),
        tuple(
            None if restart.complete_at is None else restart.complete_at - restart.ready_at
            for restart in run.restarts
        ),
        len(inside),
        sum(period.begin <= at < period.end for at, _ in load.failures),
        len(inside - decided),
        tuple(timeline.by_second(shown)),
    )


HEAD = (
    "scenario",
    "before",
    "during",
    "after",
    "deepest",
    f"s over {LIMIT_POINTS:g}",
    "lost",
    "down, s",
    "known, s",
    "unasked",
    "failed",
)
HEAD_TEXT = (
    "Cached tokens in the control, from the first stop until all routers listen, and from then on; points by "
    "which the lowest window was below the control, seconds during which windows were more than "
    f"{LIMIT_POINTS:g} below, and points below times seconds over the whole; seconds from a stop until that "
    "router listened, and from then until it had all KV events; requests that no router placed; that failed."
)


def cells(row: Row) -> list[str]:
    """One row as text, under `HEAD`."""
    return [
        row.scenario,
        f"{row.dip.baseline:.1%}",
        _share(row.during),
        _share(row.after),
        f"{row.dip.deepest_points:.1f}",
        f"{row.dip.below_s:g}",
        f"{row.dip.lost_points_s:.0f}",
        ", ".join(f"{seconds:.1f}" for seconds in row.down_s) or "-",
        ", ".join("never" if seconds is None else f"{seconds:.1f}" for seconds in row.complete_s) or "-",
        f"{row.passed_by}/{row.requests}",
        str(row.failed),
    ]


def noise_text(found: Noise) -> str:
    """How wide windows are, and why."""
    text = (
        f"windows of {found.width_s:g} s: without restarts none was more than "
        f"{found.deepest_points:.1f} points below its period"
    )
    return text if found.enough else f"{text}, which is too much: raise --rate or --control"


def seconds_text(row: Row) -> str:
    """Its shares second by second, in percent."""
    before, after = row.by_second[:LEAD_S], row.by_second[LEAD_S:]
    return f"{row.scenario}, round {row.round + 1}: {_percents(before)} | {_percents(after)}"


def _percents(shares: Sequence[float | None]) -> str:
    return " ".join("-" if share is None else f"{share * 100:.0f}" for share in shares)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def document(about: dict[str, Any], made: Report) -> dict[str, Any]:
    """The JSON report."""
    return {
        **about,
        "limit_points": LIMIT_POINTS,
        "limit_s": LIMIT_S,
        "noise": asdict(made.noise),
        "kept": made.kept,
        "requests": made.requests,
        "failed": made.failed,
        "failures": list(made.failures),
        "runs": [asdict(row) for row in made.rows],
    }


def markdown(about: dict[str, Any], made: Report) -> str:
    """The same as Markdown."""
    lines = [f"{about['date']}, {about['machine']}: `{about['command']}`", ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in made.rows]
    lines += ["", HEAD_TEXT, "", noise_text(made.noise), ""]
    lines += [f"- {seconds_text(row)}" for row in made.rows]
    return "\n".join(lines) + "\n"
