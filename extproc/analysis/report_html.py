"""An analysis as one self-contained HTML page with inline charts."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from extproc.sim.charts import Axis, axis, bars, lines, number
from extproc.sim.report_html import legend, page, pair

Report = dict[str, Any]
Column = tuple[str, Callable[[dict[str, Any]], Any]]

_GROUP_TITLES = {
    "use": "By use of the beginning",
    "class": "By class",
    "tenant": "By tenant",
    "template": "By template",
    "model": "By model",
    "session": "By session",
}


def html_report(report: Report, command: str) -> str:
    """The page. `command` is what reproduces it."""
    verdict = report["verdict"]
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict["reasons"])
    parts = [
        "<h1>Warmroute: what the log says about prefixes</h1>",
        _p(
            f"{escape(', '.join(report.get('logs', [])))}: {report['requests']:,} prompts, "
            f"{report['input_tokens']:,} input tokens. {escape(report.get('tokenizer_note', ''))}"
        ),
        f"<h2>{escape(verdict['headline'])}</h2><ul>{reasons}</ul>",
        _p(
            "<strong>Do users resend the first 10,000 tokens?</strong> "
            + escape(report["first_tokens_answer"])
        ),
        *_lengths(report),
        *_placement(report),
        *_breakers(report),
        *_prefixes(report),
        *_groups(report),
        *_lines(report),
        f"<p>Reproduce: <code>{escape(command)}</code></p>",
    ]
    return page("Warmroute analysis", parts)


def table(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """A table; the first column is text."""
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value(row)))}</td>" for _, value in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _p(text: str) -> str:
    return f"<p>{text}</p>"


def percent(value: float | None) -> str:
    """A share for people."""
    return "-" if value is None else f"{value:.1%}"


def size_name(tokens: int | None) -> str:
    """A cache size for people."""
    return "unlimited" if tokens is None else f"{tokens:,} tokens"


def position_name(breaker: dict[str, Any]) -> str:
    """Where a breaker stands: one token position, or the range and its middle."""
    position = breaker["position"]
    if position["least"] == position["most"]:
        return f"{position['least']:,}"
    return f"{position['median']:,} ({position['least']:,} to {position['most']:,})"


def _lengths(report: Report) -> list[str]:
    lengths = report["lengths"]
    bounds = lengths["bounds"]
    x = axis("tokens (log)", [max(1, bound) for bound in bounds if bound <= _top(lengths)], log=True)
    names = ["prompt length", "shared with an earlier prompt"]
    series = [
        (name, _cumulative(bounds, lengths[key]))
        for name, key in zip(names, ("prompts", "shared"), strict=True)
    ]
    chart = lines(
        "cumulative distribution of lengths", x, Axis("share of prompts", 0.0, 1.0), series, dots=True
    )
    parts = [f"<h3>Lengths</h3>{legend(names, names)}{chart}"]
    ages = report["reuse_age_s"]
    total = sum(ages["requests"])
    if total:
        labels = [*(f"up to {_duration(bound)}" for bound in ages["bounds"]), "longer"]
        shares = [(name, count / total) for name, count in zip(labels, ages["requests"], strict=True)]
        parts.append(
            "<h3>Time since the shared beginning was last used</h3>"
            + bars("time since last use", "share of prompts that share something", shares, 1.0)
        )
    else:
        parts.append("<h3>Time since the shared beginning was last used</h3><p>The log has no times.</p>")
    repeated = report["repeated"]
    return [
        "<h2>What repeats</h2>",
        _p(
            f"{percent(repeated['share'])} of input tokens repeat the beginning of an earlier prompt "
            f"({percent(repeated['block_share'])} in full blocks of {report['block_size']})."
        ),
        pair(*parts),
    ]


def _top(lengths: dict[str, Any]) -> float:
    used = [bound for bound, count in zip(lengths["bounds"], lengths["prompts"], strict=False) if count]
    return float(max(used, default=1024))


def _cumulative(bounds: Sequence[int], counts: Sequence[int]) -> list[tuple[float, float]]:
    total, running = sum(counts), 0
    points: list[tuple[float, float]] = []
    for bound, count in zip(bounds, counts, strict=False):
        running += count
        points.append((float(max(1, bound)), running / total if total else 0.0))
        if running == total:
            break
    return points


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{number(seconds)} s"


def _placement(report: Report) -> list[str]:
    rows = report["placement"]
    sizes = list(dict.fromkeys(row["cache_tokens"] for row in rows))
    names = [f"{how}, {size_name(size)}" for size in sizes for how in ("random", "by prefix")]
    series = [
        (
            f"{how}, {size_name(size)}",
            [(float(row["replicas"]), row[key]) for row in rows if row["cache_tokens"] == size],
        )
        for size in sizes
        for how, key in (("random", "random"), ("by prefix", "prefix"))
    ]
    chart = lines(
        "share of input tokens found in a cache",
        axis("replicas", [row["replicas"] for row in rows]),
        Axis("share of input tokens hit", 0.0, 1.0),
        series,
        dots=True,
    )
    columns: list[Column] = [
        ("cache per replica", lambda row: size_name(row["cache_tokens"])),
        ("replicas", lambda row: row["replicas"]),
        ("random", lambda row: percent(row["random"])),
        ("by prefix", lambda row: percent(row["prefix"])),
        ("gain", lambda row: percent(row["prefix"] - row["random"])),
        ("busiest / mean", lambda row: _uneven(row["imbalance_prefix"])),
    ]
    ordered = sorted(rows, key=lambda row: (row["cache_tokens"] is None, row["cache_tokens"] or 0))
    return [
        "<h2>What a fleet would find in its caches</h2>",
        legend(names, names),
        pair(chart, table(columns, ordered)),
    ]


def _uneven(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _breakers(report: Report) -> list[str]:
    breakers = report["breakers"]
    found = breakers["found"]
    head = "<h2>What breaks prefixes</h2>"
    if not found:
        return [head, "<p>Nothing was found that breaks otherwise equal prompts.</p>"]
    kinds: dict[str, float] = {}
    for breaker in found:
        kinds[breaker["kind"]] = kinds.get(breaker["kind"], 0.0) + breaker["share"]
    top = max(kinds.values())
    columns: list[Column] = [
        ("what stands there", lambda row: row["kind"]),
        ("at token", position_name),
        ("prompts", lambda row: f"{row['requests']:,}"),
        ("tokens lost", lambda row: f"{row['tokens']:,}"),
        ("per prompt", lambda row: f"{row['per_request']:,.0f}"),
        ("of input", lambda row: percent(row["share"])),
        ("behind" if report["text_shown"] else "behind (shape)", lambda row: row["before"].strip()[-24:]),
        ("is" if report["text_shown"] else "is (shape)", lambda row: row["example"].strip()[:24]),
        ("template", lambda row: ", ".join(row["templates"][:1])),
    ]
    advice = "".join(
        f"<li><strong>{escape(kind)}</strong>: {escape(text)}.</li>"
        for kind, text in {row["kind"]: row["advice"] for row in found}.items()
    )
    exact = (
        ""
        if breakers["exact"]
        else f" Estimated from {breakers['compared']:,} of {breakers['candidates']:,} prompts."
    )
    return [
        head,
        _p(
            f"{percent(breakers['recoverable_share'])} of input tokens would repeat an earlier beginning "
            f"but for what stands before them; another {percent(breakers['behind_text_share'])} stand behind "
            f"text that differs.{exact}"
        ),
        pair(
            bars("tokens lost", "share of input tokens lost", list(kinds.items()), top),
            f"<ul>{advice}</ul>",
        ),
        table(columns, found),
    ]


def _prefixes(report: Report) -> list[str]:
    columns: list[Column] = [
        ("ends with" if report["text_shown"] else "ends with (shape)", lambda row: row["ends"][-60:]),
        ("tokens", lambda row: f"{row['tokens']:,}"),
        ("prompts", lambda row: f"{row['requests']:,}"),
        ("repeated tokens", lambda row: f"{row['repeated_tokens']:,}"),
        ("model", lambda row: row["model"]),
    ]
    return ["<h2>The biggest shared beginnings</h2>", table(columns, report["prefixes"])]


def _groups(report: Report) -> list[str]:
    where = report["groups_for"]
    columns: list[Column] = [
        ("", lambda row: row["name"]),
        ("prompts", lambda row: f"{row['requests']:,}"),
        ("tokens", lambda row: f"{row['tokens']:,}"),
        ("repeated", lambda row: percent(row["repeated_share"])),
        ("random", lambda row: percent(row["random_share"])),
        ("by prefix", lambda row: percent(row["prefix_share"])),
        ("lost to breakers", lambda row: percent(row["lost_share"])),
    ]
    parts = [
        "<h2>Whose tokens repeat</h2>",
        _p(f"Hits are for {where['replicas']} replicas with {where['cache_tokens']:,} KV tokens each."),
    ]
    for kind, rows in report["groups"].items():
        if rows:
            parts.append(f"<h3>{escape(_GROUP_TITLES[kind])}</h3>{table(columns, rows)}")
    return parts


def _lines(report: Report) -> list[str]:
    counts = report["lines"]
    forms = ", ".join(f"{name} {count:,}" for name, count in report["forms"].items())
    notes = "".join(f"<li>{escape(note)}</li>" for note in report["bounds"]["notes"])
    reasons = "".join(
        f"<li>{row['lines']:,} lines: {escape(row['reason'])} "
        f"(such as {escape(', '.join(row['examples']))})</li>"
        for row in (*counts["bad_reasons"], *counts["not_encoded_reasons"])
    )
    return [
        "<h2>What was read</h2>",
        _p(
            f"{counts['read']:,} lines: {counts['bad']:,} unreadable, {counts['not_encoded']:,} that cannot "
            f"be tokenized here, {counts['skipped']:,} that are no generation requests. "
            f"Shapes: {escape(forms)}."
        ),
        f"<ul>{reasons}{notes}</ul>",
    ]
