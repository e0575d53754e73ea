"""An explained decision as plain text, in columns."""

from collections.abc import Sequence

from extproc.protocol.explanation import TERMS, Line, candidates, explain

SHOWN = 12

_HEADS = ("worker", "total", *TERMS.values(), "cached", "to compute", "requests", "trust", "metrics age")


def as_text(line: Line, shown: int | None = SHOWN) -> str:
    """The whole story; of the candidates the first `shown` (None: all)."""
    story = explain(line)
    parts = [story.headline, _block(story.request)]
    found = candidates(line)
    if found:
        parts.append(_table(found, shown))
    for title, sentences in (
        ("Why", story.why),
        ("What happened", story.happened),
        ("Other policies", story.shadows),
    ):
        if sentences:
            parts.append(f"{title}\n{_block(sentences)}")
    return "\n\n".join(parts) + "\n"


def _block(sentences: Sequence[str]) -> str:
    return "\n".join(f"  {sentence}" for sentence in sentences)


def _table(found: Sequence[Line], shown: int | None) -> str:
    """Candidates in order of preference; times in milliseconds, sizes in tokens."""
    visible = found if shown is None else found[:shown]
    rows = [_HEADS, *(_row(candidate) for candidate in visible)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADS))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append(("> " if number == 1 else "  ") + "  ".join(cells).rstrip())
    if len(visible) < len(found):
        lines.append(f"  ... and {len(found) - len(visible)} more")
    return "Candidates, best first (ms, tokens)\n" + "\n".join(lines)


def _row(candidate: Line) -> tuple[str, ...]:
    age, trust = candidate.get("metrics_age_s"), candidate.get("confidence")
    cached, offloaded = candidate.get("cached_tokens") or 0, candidate.get("offloaded_tokens") or 0
    return (
        str(candidate.get("worker")),
        _number(candidate.get("total_ms"), 1),
        *(_number(candidate.get(term), 1) for term in TERMS),
        _number(cached, 0) + (f"+{offloaded:,}" if offloaded else ""),
        _number(candidate.get("uncovered_tokens"), 0),
        _number(candidate.get("active"), 0),
        "?" if trust is None else f"{trust:.0%}",
        "never" if age is None else f"{age:.1f} s",
    )


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:,.{digits}f}"
