"""What one run measured, and what a reader should see of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

Callback = Callable[[str], None]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of `values` do not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(slots=True)
class PolicyResult:
    """Requests of one policy as the client saw them, and the router's own audit of them."""

    policy: str
    ttft_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    exact: int = 0  # requests whose predicted cached tokens equal the actual ones
    audited: int = 0

    @property
    def cached_token_share(self) -> float | None:
        """Share of prompt tokens that did not have to be computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def summary(self) -> dict[str, Any]:
        """As in the JSON report."""
        return {
            "requests": self.requests,
            "failed": len(self.failures),
            "ttft_ms": {
                f"p{round(share * 100)}": _round(percentile(self.ttft_ms, share))
                for share in (0.5, 0.95, 0.99)
            },
            "cached_token_share": _round(self.cached_token_share, 4),
        }


def report(results: Sequence[PolicyResult]) -> dict[str, Any]:
    """The JSON report. `predicted_vs_actual` is about the last policy, the one that uses the prediction."""
    last = results[-1]
    return {
        "policies": {result.policy: result.summary() for result in results},
        "predicted_vs_actual": {"exact": last.exact, "total": last.audited},
    }


def table(results: Sequence[PolicyResult]) -> Table:
    """The table a newcomer reads: one column per policy, so that it fits any terminal."""
    out = Table(title="What the clients saw", title_justify="left")
    out.add_column("")
    for result in results:
        out.add_column(result.policy, justify="right")
    for share in (0.5, 0.95, 0.99):
        values = [percentile(result.ttft_ms, share) for result in results]
        name = f"time to first token, p{round(share * 100)}"
        out.add_row(name, *("-" if value is None else f"{value:.0f} ms" for value in values))
    shares = [result.cached_token_share for result in results]
    out.add_row("prompt tokens found in a cache", *("-" if s is None else f"{s:.1%}" for s in shares))
    out.add_row("cached tokens predicted exactly", *(f"{r.exact} of {r.audited}" for r in results))
    out.add_row("requests", *(str(result.requests) for result in results))
    out.add_row("failed requests", *(str(len(result.failures)) for result in results))
    out.add_row("time for all of them", *(f"{result.wall_s:.1f} s" for result in results))
    return out


def _round(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)
