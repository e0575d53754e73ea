"""A histogram with fixed bounds: what Prometheus exposes, without Prometheus."""

from bisect import bisect_left
from collections.abc import Sequence

from extproc.core.types import HistogramTotals


class Histogram:
    """Counts of observations by upper bound; `bounds` ascend and infinity is implied.

    A bucket holds what is less than or equal to its bound.
    """

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.count = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, as if it had been seen `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        self.count += times

    def observe_run(self, low: float, high: float, total: float, times: int) -> bool:
        """Count `times` values between `low` and `high` that sum to `total`.

        False, and nothing is counted, if a bound lies between them: observe them one by one.
        """
        bucket = bisect_left(self.bounds, low)
        if bucket != bisect_left(self.bounds, high):
            return False
        self.counts[bucket] += times
        self.total += total
        self.count += times
        return True

    def cumulative(self) -> list[tuple[str, float]]:
        """(`le` label, observations up to it), the last one being `+Inf`."""
        out: list[tuple[str, float]] = []
        running = 0
        for bound, seen in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += seen
            out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(running)))
        return out

    def totals(self) -> HistogramTotals:
        """Sum and count."""
        return HistogramTotals(self.total, float(self.count))
