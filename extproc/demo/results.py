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
    """The JSON report."""
    return {
        "policies": {result.policy: result.summary() for result in results},
        "predicted_vs_actual": {
            "exact": sum(result.exact for result in results),
            "total": sum(result.audited for result in results),
        },
    }


def table(results: Sequence[PolicyResult]) -> Table:
    """The table a newcomer reads."""
    out = Table(title="Time to first token (TTFT), and prompt tokens that needed no prefill")
    out.add_column("routing")
    for name in (
        "requests",
        "failed",
        "TTFT p50",
        "p95",
        "p99",
        "cached tokens",
        "prediction exact",
        "total time",
    ):
        out.add_column(name, justify="right")
    for result in results:
        ttft = [percentile(result.ttft_ms, share) for share in (0.5, 0.95, 0.99)]
        share = result.cached_token_share
        out.add_row(
            result.policy,
            str(result.requests),
            str(len(result.failures)),
            *("-" if value is None else f"{value:.0f} ms" for value in ttft),
            "-" if share is None else f"{share:.1%}",
            f"{result.exact} of {result.audited}",
            f"{result.wall_s:.1f} s",
        )
    return out


def _round(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)
