"""The report as one self-contained HTML file: tables and charts, light or dark as the reader prefers."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from extproc.sim.charts import COLOURS, Axis, axis, band, bars, lines, number
from extproc.sim.results import Result, knees, load_name

_LIGHT = (
    "2563eb",
    "d97706",
    "059669",
    "dc2626",
    "7c3aed",
    "0891b2",
    "be185d",
    "65a30d",
    "4b5563",
    "ea580c",
    "0d9488",
    "9333ea",
)
_DARK = (
    "60a5fa",
    "fbbf24",
    "34d399",
    "f87171",
    "a78bfa",
    "22d3ee",
    "f472b6",
    "a3e635",
    "9ca3af",
    "fb923c",
    "2dd4bf",
    "c084fc",
)
_MOST_LINES = 8  # workers drawn one by one; more become a band
_MOST_POINTS = 160  # of a load chart

_COLUMNS: tuple[tuple[str, str, bool], ...] = (
    # path in the result, heading, whether less is better
    ("ttft_ms.p50", "TTFT p50 ms", True),
    ("ttft_ms.p95", "p95", True),
    ("ttft_ms.p99", "p99", True),
    ("tpot_ms.p50", "TPOT p50 ms", True),
    ("tpot_ms.p95", "p95", True),
    ("e2e_ms.p50", "e2e p50 ms", True),
    ("e2e_ms.p99", "p99", True),
    ("rollout_ms.p50", "session p50 ms", True),
    ("rollout_ms.p99", "p99", True),
    ("output_tok_s", "output tok/s", False),
    ("cached_token_share", "cached share", False),
    ("decode_blocks_cv", "decode CV", True),
    ("preemptions", "preempted", True),
    ("failed", "failed", True),
)

_STYLE = """
:root { color-scheme: light dark;
  --ink: #111827; --dim: #6b7280; --page: #ffffff; --rule: #e5e7eb; --best: #d9f7e8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --dim: #9ca3af; --page: #0f1419; --rule: #2a323c; --best: #0f2f24; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
       max-width: 1440px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: .95rem; margin: .8rem 0 .2rem; }
p, dt, .note { color: var(--dim); } code { font-size: .85em; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem;
        white-space: nowrap; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; } td.best { background: var(--best); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: .6rem 0; } dd { margin: 0; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 0 1.5rem; }
svg { width: 100%; height: auto; display: block; } .grid { stroke: var(--rule); stroke-width: 1; }
.tick, .label { fill: var(--dim); font-size: 12px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .band { opacity: .25; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .85rem; margin: .3rem 0; padding: 0;
          list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem;
            vertical-align: -1px; }
"""


def html_report(
    about: Mapping[str, Any], results: Sequence[Result], knee_ttft_ms: float, command: str
) -> str:
    """The page.

    Args:
        about: what was simulated, in the order in which to show it.
        results: with their `plots`.
        knee_ttft_ms: see `extproc.sim.results.knees`.
        command: what reproduces it.
    """
    policies = list(dict.fromkeys(r["policy"] for r in results))
    title = f"Warmroute simulation: {about.get('workload', '')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<dl>{''.join(_fact(k, v) for k, v in about.items() if v is not None)}</dl>",
        f"<p>Reproduce: <code>{escape(command)}</code></p>",
    ]
    parts += _knee_section(results, policies, knee_ttft_ms)
    for load, group in _by_load(results):
        parts += _load_section(load, group, policies)
    return page(title, parts)


def page(title: str, parts: Sequence[str]) -> str:
    """A self-contained page, light or dark as the reader's system is. `parts` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{_colours()}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _load_section(load: str, group: Sequence[Result], policies: Sequence[str]) -> list[str]:
    series = [(r["policy"], r["plots"]["ttft_cdf"]) for r in group]
    # A colour belongs to a policy, so that it is the same in every chart.
    ordered = [(name, dict(series).get(name, [])) for name in policies]
    times = [ms for _, points in series for ms, _ in points]
    shares = {r["policy"]: r["cached_token_share"] or 0.0 for r in group}
    cdf = lines(
        "cumulative distribution of the time to first token",
        axis("time to first token, ms (log)", times, log=True),
        Axis("share of requests", 0.0, 1.0),
        ordered,
    )
    cached = bars(
        "share of prompt tokens found in a prefix cache",
        "share of prompt tokens found in a prefix cache",
        [(name, shares[name]) for name in policies if name in shares],
        1.0,
    )
    return [
        f"<h2>{escape(load)}</h2>",
        _table(group),
        legend([name for name in policies if dict(series).get(name)], policies),
        pair(f"<h3>Time to first token</h3>{cdf}", f"<h3>Prefix-cache hits</h3>{cached}"),
        "<h3>Load over time: KV blocks of decoding sequences, by worker</h3>",
        f'<div class="grid2">{"".join(_load_chart(r, group) for r in group)}</div>',
    ]


def _load_chart(result: Result, group: Sequence[Result]) -> str:
    rows, width = _thinned(result["plots"]["load"], result["plots"]["load_width_s"])
    every = [r["plots"] for r in group]
    x = axis("seconds", [p["load_width_s"] * len(p["load"]) for p in every])
    y = axis("KV blocks", [value for p in every for row in p["load"] for value in row])
    title = f"load over time under {result['policy']}"
    at = [(index + 0.5) * width for index in range(len(rows))]
    if rows and len(rows[0]) > _MOST_LINES:
        low, high = ([(t, f(row)) for t, row in zip(at, rows, strict=True)] for f in (min, max))
        mean = [(t, sum(row) / len(row)) for t, row in zip(at, rows, strict=True)]
        chart = band(title, x, y, low, mean, high)
    else:
        workers = range(len(rows[0]) if rows else 0)
        chart = lines(
            title,
            x,
            y,
            [(f"worker {w}", [(t, r[w]) for t, r in zip(at, rows, strict=True)]) for w in workers],
        )
    return f"<div><h3>{escape(result['policy'])}</h3>{chart}</div>"


def _thinned(rows: Sequence[Sequence[float]], width: float) -> tuple[list[list[float]], float]:
    """Neighbouring rows averaged until few enough are left to be told apart."""
    out = [list(row) for row in rows]
    while len(out) > _MOST_POINTS:
        halves = zip(out[::2], out[1::2], strict=False)
        out = [[(a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in halves]
        width *= 2
    return out, width


def _knee_section(results: Sequence[Result], policies: Sequence[str], knee_ttft_ms: float) -> list[str]:
    found = knees(results, knee_ttft_ms)
    if not found:
        return []
    name = load_name(results[0]) or "load"
    label = "sessions per second" if name == "rate" else "sessions at once"
    series = [
        (
            policy,
            sorted(
                (r[name], r["ttft_ms"]["p95"])
                for r in results
                if r["policy"] == policy and r["ttft_ms"]["p95"] is not None
            ),
        )
        for policy in policies
    ]
    points = [point for _, line in series for point in line]
    chart = lines(
        "p95 of the time to first token by load",
        axis(label, [x for x, _ in points]),
        axis("TTFT p95, ms (log)", [y for _, y in points], log=True),
        series,
        dots=True,
    )
    rows = "".join(
        f"<tr><td>{escape(k['policy'])}</td><td>{'none' if k[name] is None else number(k[name])}</td></tr>"
        for k in found
    )
    limit = f"highest {label} with TTFT p95 within {number(knee_ttft_ms)} ms"
    head = f"<thead><tr><th>policy</th><th>{escape(limit)}</th></tr></thead>"
    return [
        "<h2>Rising load</h2>",
        legend(policies, policies),
        pair(chart, f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'),
    ]


def pair(left: str, right: str) -> str:
    """Two pieces of HTML beside each other, where there is room."""
    return f'<div class="grid2"><div>{left}</div><div>{right}</div></div>'


def _table(group: Sequence[Result]) -> str:
    columns = [
        (path, head, less) for path, head, less in _COLUMNS if any(_at(r, path) is not None for r in group)
    ]
    best: dict[str, float] = {}
    for path, _, less in columns:
        values = [value for r in group if (value := _at(r, path)) is not None]
        if len(set(values)) > 1:
            best[path] = min(values) if less else max(values)
    body = "".join(
        f"<tr><td>{escape(r['policy'])}</td>"
        + "".join(_cell(_at(r, path), path in best and _at(r, path) == best[path]) for path, _, _ in columns)
        + "</tr>"
        for r in group
    )
    heads = "".join(f"<th>{escape(head)}</th>" for _, head, _ in columns)
    return (
        f'<div class="scroll"><table><thead><tr><th>policy</th>{heads}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _cell(value: float | None, best: bool) -> str:
    shown = "n/a" if value is None else number(value)
    return f'<td class="best">{shown}</td>' if best else f"<td>{shown}</td>"


def _at(result: Result, path: str) -> float | None:
    value: Any = result
    for name in path.split("."):
        value = value[name]
    found: float | None = value
    return found


def _by_load(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    groups: dict[tuple[str, float], list[Result]] = {}
    for result in results:
        name = load_name(result)
        groups.setdefault((name or "", result[name] if name else 0.0), []).append(result)
    titles = {
        "rate": "{} sessions per second",
        "concurrency": "{} sessions at once",
        "": "the workload's own load",
    }
    return [(titles[name].format(number(value)), group) for (name, value), group in sorted(groups.items())]


def _fact(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {_plain(part)}" for key, part in value.items())
    return f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_plain(value))}</dd>"


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def legend(shown: Sequence[str], policies: Sequence[str]) -> str:
    """Names with their colours: a name's colour is that of its place in `policies`."""
    items = "".join(
        f'<li><i class="b{policies.index(name) % COLOURS}"></i>{escape(name)}</li>' for name in shown
    )
    return f'<ul class="legend">{items}</ul>'


def _colours() -> str:
    def rules(palette: Sequence[str]) -> str:
        return "".join(
            f".s{at}{{stroke:#{c}}}.f{at}{{fill:#{c}}}.b{at}{{background:#{c}}}"
            for at, c in enumerate(palette)
        )

    return f"{rules(_LIGHT)}\n@media (prefers-color-scheme: dark) {{{rules(_DARK)}}}\n"
