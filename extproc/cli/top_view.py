"""The state of a Warmroute as terminal text."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from extproc.protocol.explanation import TERMS

State = Mapping[str, Any]

_STYLES = {"queue_ms": "blue", "prefill_ms": "yellow", "decode_ms": "green", "kv_risk_ms": "magenta"}
_BAR = 24
_LOWEST = 16
_DECISIONS = 20
_PREFIXES = 8
_TENANTS = 4


def view(state: State, height: int | None) -> RenderableType:
    """Everything, shortened so that it fits into `height` lines (at least 16); None: as long as it is."""
    warned, workers, prefixes = state["warnings"], state["workers"], state["prefixes"]
    held = len(state.get("held", ()))
    plan = _Plan.of(len(warned), len(workers), len(state["decisions"]), len(prefixes), height, held)
    parts: list[RenderableType] = [_head(state)]
    if warned:
        parts += [_title("Warnings"), *(_warning(one) for one in warned[: plan.warnings])]
        parts += _more(state["warnings_total"] - plan.warnings)
    ready = sum(worker["ready"] for worker in workers)
    parts += [_title(f"Workers ({ready} of {len(workers)} ready)"), _workers(workers[: plan.workers])]
    parts += _more(len(workers) - plan.workers)
    parts += [_decisions_title(), _decisions(state["decisions"][: plan.decisions])]
    if plan.prefixes:
        parts += [_title("Hottest prefixes"), _prefixes(prefixes[: plan.prefixes])]
    return Group(*parts)


class _Plan(NamedTuple):
    """How many of each kind there is room for."""

    warnings: int
    workers: int
    decisions: int
    prefixes: int

    @classmethod
    def of(
        cls, warnings: int, workers: int, decisions: int, prefixes: int, height: int | None, held: int = 0
    ) -> "_Plan":
        """For so many of each; a title takes two lines, a table's head one, `more` another."""
        if height is None:
            return cls(warnings, workers, min(_DECISIONS, decisions), min(_PREFIXES, prefixes))
        left = max(height, _LOWEST) - 2 - held
        warned = min(warnings, max(1, left // 8))
        left -= 2 + warned + (warned < warnings) if warnings else 0
        shown = min(workers, max(2, (left - 8) // 2))
        left -= 3 + shown + (shown < workers)
        decided = min(_DECISIONS, decisions, max(1, left - 3))
        left -= 3 + decided
        return cls(warned, shown, decided, max(0, min(_PREFIXES, prefixes, left - 3)))


def _more(count: int) -> list[RenderableType]:
    return [Text(f"  ... and {count} more", style="dim")] if count > 0 else []


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _head(state: State) -> Text:
    counters = state["counters"]
    compared = counters["exact"] + counters["mispredicted"]
    exact = f", {counters['exact'] / compared:.0%} of predicted hits exact" if compared else ""
    shadow = f" (shadow: {', '.join(state['shadow'])})" if state["shadow"] else ""
    mode = state.get("mode", "enforce")
    text = Text()
    text.append("Warmroute ", style="bold")
    if state["ready"]:
        text.append("ready", style="green")
    else:
        text.append("NOT READY", style="bold red")
    text.append(f"  {state['policy']}{shadow}")
    if mode != "enforce":  # else what is seen here is what is done
        text.append(f", mode {mode},", style="yellow")
    text.append(f" on {state['listen']}, up {_age(state['uptime_s'])}")
    text.append(f", {state['time'][11:19]} UTC\n")
    text.append(
        f"{counters['routed']:,} routed, {state['open_requests']:,} open, "
        f"{sum(counters['rejected'].values()):,} refused, {counters['lost']:,} lost{exact}"
    )
    for held in state.get("held", ()):
        text.append(f"\n{_held(held)}")
    return text


def _held(held: State) -> str:
    """What one pool holds, and for whom."""
    who = ", ".join(
        f"{one['tenant'] or 'no tenant'}{_priority(one['priority'])} {one['requests']:,}"
        for one in held["waiting"][:_TENANTS]
    )
    wait = "" if held["wait_s"] is None else f", about {_age(held['wait_s'])} for one more"
    full = f"{len(held['full_workers']):,} workers full"
    return f"{held['pool']}: {held['requests']:,} held{wait}, {full}" + (f" ({who})" if who else "")


def _priority(priority: int) -> str:
    return f" at {priority:+d}" if priority else ""


def _warning(one: Mapping[str, Any]) -> Text:
    style = "red" if one["severity"] == "bad" else "yellow"
    text = Text("! ", style=style, no_wrap=True, overflow="ellipsis")
    text.append(f"{one['subject']}: {one['text']}", style=style)
    text.append(f" ({one['cause']})", style="dim")
    return text


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        left = head.startswith("<")
        table.add_column(head.removeprefix("<"), justify="left" if left else "right", no_wrap=True)
    return table


def _workers(workers: Sequence[State]) -> Table:
    table = _table(
        "<worker", "<state", "ours", "others", "waiting", "queued ms", "KV used", "cache", "<events", "trust",
        "prefill/s", "metrics",
    )  # fmt: skip
    for worker in workers:
        others, cache, trust = worker["others"], worker["cache"], worker["trust"]
        table.add_row(
            worker["worker"],
            _readiness(worker),
            f"{worker['load']['requests']:,}",
            "?" if others is None else f"{others['running']:,}",
            _count(worker["engine"]["waiting"]),
            f"{worker['load']['queued_prefill_ms']:,.0f}",
            _share(worker["engine"]["kv_usage"]),
            _cache(cache),
            _events(cache),
            _share(trust["confidence"]) if trust["audits"] else "-",
            _count(worker["rates"]["prefill_tokens_per_s"]),
            _age(worker["metrics_age_s"]),
        )
    return table


def _readiness(worker: State) -> Text:
    if worker.get("last_resort"):  # a Warmroute of before does not tell
        return Text("last resort", style="bold yellow")
    return Text("ready", style="green") if worker["ready"] else Text("not ready", style="bold red")


def _cache(cache: State) -> str:
    blocks = cache["blocks"] or cache["assumed_blocks"]
    if cache["capacity_blocks"]:
        return f"{blocks / cache['capacity_blocks']:.0%} of {cache['capacity_blocks']:,}"
    return f"{blocks:,} blocks"


def _events(cache: State) -> Text:
    if cache["suspended"]:
        return Text("not known", style="yellow")
    if cache["events_complete"]:
        return Text("complete", style="green")
    if cache["event_age_s"] is not None:
        return Text("incomplete", style="yellow")
    return Text("guessed" if cache["assumed_blocks"] else "none", style="dim")


def _decisions_title() -> Text:
    text = _title("Recent decisions   ")
    for term, name in TERMS.items():
        text.append("█ ", style=_STYLES[term])
        text.append(f"{name}  ", style="dim")
    return text


def _decisions(lines: Sequence[State]) -> RenderableType:
    if not lines:
        return Text("none yet: they appear when requests end", style="dim")
    table = _table(
        "<time", "<request", "<decision", "<worker", "<cost", "ms", "next", "tokens", "cached", "TTFT", "<end"
    )
    for line in lines:
        found = line["candidate_workers"]
        best = found[0]
        following = min((c["total_ms"] for c in found[1:]), default=None)
        longest = max(best["total_ms"], following or 0.0, 1e-9)
        took = line["upstream_ttft_ms"] if line["upstream_ttft_ms"] is not None else line["ttft_ms"]
        table.add_row(
            line["time"][11:19],
            _fit(line["request_id"], 14),
            line["decision"],
            line["selected_worker"],
            _bar(best, longest),
            f"{best['total_ms']:,.1f}",
            "-" if following is None else f"{following:,.1f}",
            _count(line["prompt_tokens"]),
            _count(line["actual_cached_tokens"]),
            "-" if took is None or not line["stream"] else f"{took:,.1f}",
            Text(line["outcome"], style="" if line["outcome"] == "finished" else "yellow"),
        )
    return table


def _bar(candidate: State, longest: float) -> Text:
    """The terms of a cost, as long as they are beside the `longest` one."""
    text, done, drawn = Text(), 0.0, 0
    for term in TERMS:
        done += candidate[term]
        until = round(_BAR * done / longest)
        text.append("█" * (until - drawn), style=_STYLES[term])
        drawn = max(drawn, until)
    text.append("·" * (_BAR - drawn), style="dim")
    return text


def _prefixes(found: Sequence[State]) -> Table:
    table = _table("<prefix", "requests", "cached tokens", "share", "<where")
    for prefix in found:
        where = ", ".join(f"{name} x {count}" for name, count in list(prefix["workers"].items())[:3])
        share = prefix["cached_tokens"] / prefix["prompt_tokens"] if prefix["prompt_tokens"] else None
        table.add_row(
            prefix["prefix_key"],
            f"{prefix['requests']:,}",
            f"{prefix['cached_tokens']:,}",
            _share(share),
            where,
        )
    return table


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
