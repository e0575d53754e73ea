"""What a run measured, and the figures made from it.

Percentiles are exact: the value at rank `ceil(p * n)` of the sorted samples. Shares are between 0 and 1.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

_MAX_POINTS = 480


class Series:
    """A few hundred points of a long series: pairs are averaged whenever it gets longer than that.

    One row per point, one number per worker; every row covers `width_s` seconds.
    """

    __slots__ = ("_merged", "_pending", "_per_row", "_step_s", "rows")

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._per_row = 1
        self._pending: list[float] | None = None
        self._merged = 0
        self.rows: list[list[float]] = []

    @property
    def width_s(self) -> float:
        """Seconds that one row covers."""
        return self._step_s * self._per_row

    def add(self, values: Sequence[float]) -> None:
        """The next sample."""
        if self._pending is None:
            self._pending = list(values)
        else:
            self._pending = [a + b for a, b in zip(self._pending, values, strict=True)]
        self._merged += 1
        if self._merged < self._per_row:
            return
        self.rows.append([value / self._per_row for value in self._pending])
        self._pending, self._merged = None, 0
        if len(self.rows) >= _MAX_POINTS:
            halves = zip(self.rows[::2], self.rows[1::2], strict=True)
            self.rows = [[(a + b) / 2 for a, b in zip(*pair, strict=True)] for pair in halves]
            self._per_row *= 2


@dataclass(slots=True)
class Measures:
    """Samples of one run. Times in seconds; warm-up requests are not in it.

    Attributes:
        ttft: from sending a request to its first token, by request.
        tpot: (end - first token) / (output tokens - 1), by request of at least two tokens.
        e2e: from sending to the last token, by request.
        rollout: from the first turn's sending to the last turn's end, by session that did not fail.
        group: statistics class of each request of `ttft`, as an index into `groups`.
        decode_cv: coefficient of variation, over workers, of the KV blocks of decoding sequences; one per
            time bin in which there were any.
        load: decode blocks per worker over time.
        waiting: requests waiting per worker over time.
    """

    replicas: int
    bin_s: float
    ttft: "array[float]" = field(default_factory=lambda: array("d"))
    tpot: "array[float]" = field(default_factory=lambda: array("d"))
    e2e: "array[float]" = field(default_factory=lambda: array("d"))
    rollout: "array[float]" = field(default_factory=lambda: array("d"))
    group: "array[int]" = field(default_factory=lambda: array("I"))
    groups: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)  # tokens, by group
    prompt: dict[str, int] = field(default_factory=dict)  # tokens, by group
    output_tokens: int = 0
    sent: list[int] = field(default_factory=list)  # requests by worker
    requests: int = 0
    failed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    failed_by: dict[str, int] = field(default_factory=dict)  # by group
    preemptions: int = 0
    began: float | None = None
    ended: float = 0.0
    cv_sum: float = 0.0
    cv_bins: int = 0
    load: Series = field(init=False)
    waiting: Series = field(init=False)

    def __post_init__(self) -> None:
        self.load, self.waiting = Series(self.bin_s), Series(self.bin_s)
        self.sent = [0] * self.replicas

    def sample(self, blocks: Sequence[int], waiting: Sequence[int]) -> None:
        """One time bin."""
        self.load.add(blocks)
        self.waiting.add(waiting)
        total = sum(blocks)
        if total:
            mean = total / len(blocks)
            variance = sum((value - mean) ** 2 for value in blocks) / len(blocks)
            self.cv_sum += math.sqrt(variance) / mean
            self.cv_bins += 1

    def finished(
        self,
        group: str,
        ttft: float,
        e2e: float,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
    ) -> None:
        """A request has got its last token."""
        self.ttft.append(ttft)
        self.e2e.append(e2e)
        self.group.append(self.groups.setdefault(group, len(self.groups)))
        if output_tokens > 1:
            self.tpot.append((e2e - ttft) / (output_tokens - 1))
        self.output_tokens += output_tokens
        self.prompt[group] = self.prompt.get(group, 0) + prompt_tokens
        self.cached[group] = self.cached.get(group, 0) + cached_tokens

    def fail(self, why: str, group: str = "") -> None:
        """A request was refused."""
        self.failed += 1
        self.failed_by[group] = self.failed_by.get(group, 0) + 1
        self.failures[why] = self.failures.get(why, 0) + 1


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value at rank `ceil(share * n)` of ascending samples; None without samples."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def times_ms(samples: Sequence[float]) -> dict[str, float | None]:
    """p50, p95, p99 and mean of times given in seconds, in milliseconds."""
    ordered = sorted(samples)
    out = {
        name: _ms(percentile(ordered, share)) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }
    out["mean"] = _ms(math.fsum(ordered) / len(ordered)) if ordered else None
    return out


def curve_ms(samples: Sequence[float], points: int = 100) -> list[tuple[float, float]]:
    """(milliseconds, share of samples up to it), for a cumulative distribution."""
    ordered = sorted(samples)
    shares = [at / points for at in range(1, points)] + [0.995, 0.999, 1.0]
    return [
        (round(value * 1000.0, 3), share)
        for share in shares
        if (value := percentile(ordered, share)) is not None
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)
