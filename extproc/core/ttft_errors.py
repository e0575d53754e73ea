"""How well times to first token are predicted: relative errors of the last requests, per pool.

    error = (predicted - actual) / actual

Only requests that were streamed count, served where they were sent. The median of the errors is the bias; the
quantiles are of their absolute values.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from extproc.core.outcomes import Released, answered

WINDOW = 256


class TtftErrors(NamedTuple):
    """Of the last `requests` requests of a pool: shares of the actual time. None: there were none.

    Attributes:
        requests: how many it rests on, at most `WINDOW`.
        bias: median error; above 0 means predicted too long.
        median: median absolute error.
        p90: nine of ten absolute errors are at most this.
    """

    requests: int
    bias: float | None
    median: float | None
    p90: float | None


def relative_error(released: Released) -> float | None:
    """Error of the prediction for one request; None where there is nothing to compare."""
    lease, completion = released.lease, released.completion
    actual, served = completion.upstream_first_body_ms, completion.served_by
    request = lease.decision.request
    if not answered(completion) or not request.stream or request.load_only is not None:
        return None
    if actual is None or actual <= 0.0 or served not in (None, lease.decision.chosen.worker.endpoint):
        return None
    return (lease.decision.chosen.cost.ttft_ms - actual) / actual


def summarize(errors: Iterable[float]) -> TtftErrors:
    """The figures of any number of relative errors."""
    ordered = sorted(errors)
    sizes = sorted(map(abs, ordered))
    return TtftErrors(len(ordered), _rank(ordered, 0.5), _rank(sizes, 0.5), _rank(sizes, 0.9))


def _rank(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class ErrorBook:
    """Errors by pool."""

    def __init__(self) -> None:
        self._pools: dict[str, deque[float]] = {}

    def observe(self, released: Released) -> None:
        """A request has ended."""
        error = relative_error(released)
        if error is not None:
            pool = released.lease.decision.request.pool
            self._pools.setdefault(pool, deque(maxlen=WINDOW)).append(error)

    def of(self, pool: str) -> TtftErrors:
        """What is known of a pool."""
        return summarize(self._pools.get(pool, ()))
