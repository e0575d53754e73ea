"""Time to first token as a function of work, learned while running.

For a request that finds nothing queued ahead of it:

    ttft_ms = overhead + per_sequence * n + per_token * u + per_mpair * (u * c + u^2 / 2) / 1e6

u uncovered prompt tokens, c cached ones before them, n sequences running on the worker. The first two terms
are what a request waits for whatever its length (network, the step under way, its own step's fixed cost and
the decodes in it); the third is the linear part of prefill; the fourth is attention, which reads everything
before each token. The shape is the usual one of a step's cost: see `extproc.sim.time_model`.

The coefficients are a weighted least-squares fit over the requests of a pool with exponential forgetting.
Errors count relative to the measured time, so short waits matter as much as long ones; samples far off a
settled fit count little; no coefficient is negative. Until there are samples, a prior stands in for them, and
its weight fades. A worker that is consistently faster or slower than its pool by more than 20 % gets a
factor of its own: noise between equal workers must not make one look better for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.core.estimators import Window
from extproc.core.types import WorkerId

MPAIR = 1e6
_FEATURES = 4
_FORGET = 0.99  # per sample: a memory of about a hundred requests
_OUTLIER = 0.5
_OUTLIER_WEIGHT = 0.05
_SETTLED = 20
_PRIOR_WEIGHT = 0.05  # of a sample
_RIDGE = 1e-6
_SHORTEST_MS = 0.1
_DEVIATION = 0.2


@dataclass(frozen=True, slots=True)
class TtftCoefficients:
    """See the module. Milliseconds."""

    overhead_ms: float
    per_sequence_ms: float
    per_token_ms: float
    per_mpair_ms: float

    def wait_ms(self, sequences: float) -> float:
        """What a request waits for whatever its length."""
        return self.overhead_ms + self.per_sequence_ms * sequences

    def prefill_ms(self, uncovered: float, cached: float) -> float:
        """Computing `uncovered` tokens behind `cached` ones."""
        return self.per_token_ms * uncovered + self.per_mpair_ms * pairs(uncovered, cached)

    def scaled(self, factor: float) -> "TtftCoefficients":
        """The same shape, slower by `factor`."""
        return TtftCoefficients(
            self.overhead_ms * factor,
            self.per_sequence_ms * factor,
            self.per_token_ms * factor,
            self.per_mpair_ms * factor,
        )


def pairs(uncovered: float, cached: float) -> float:
    """Millions of (token, earlier token) pairs that attention goes through."""
    return (uncovered * cached + uncovered * uncovered / 2.0) / MPAIR


class TtftModels:
    """A model for each pool: pools serve different models on different machines."""

    def __init__(self, prior: TtftCoefficients) -> None:
        self._prior = prior
        self._pools: dict[str, TtftModel] = {}

    def of(self, pool: str) -> "TtftModel":
        """The pool's model."""
        model = self._pools.get(pool)
        if model is None:
            model = self._pools[pool] = TtftModel(self._prior)
        return model

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        for model in self._pools.values():
            model.forget(worker)


class TtftModel:
    """One pool's fit, and factors for workers that differ.

    Args:
        prior: coefficients until there are samples.
    """

    def __init__(self, prior: TtftCoefficients) -> None:
        self._prior = prior
        self._matrix = [[0.0] * _FEATURES for _ in range(_FEATURES)]
        self._vector = [0.0] * _FEATURES
        self._samples = 0
        self._fit = prior
        self._factors: dict[WorkerId, Window] = {}
        for uncovered, cached, sequences in ((0, 0, 0), (0, 0, 8), (2000, 0, 0), (2000, 20_000, 0)):
            features = (1.0, float(sequences), float(uncovered), pairs(uncovered, cached))
            self._add(features, self._predict(prior, features), _PRIOR_WEIGHT)

    @property
    def learned(self) -> bool:
        """Whether the fit rests on samples rather than on the prior."""
        return self._samples >= _SETTLED

    def observe(
        self, worker: WorkerId, *, uncovered: int, cached: int, sequences: int, ttft_ms: float
    ) -> None:
        """A request that found nothing queued ahead of it had its first token after `ttft_ms`."""
        if ttft_ms <= 0.0 or uncovered < 0:
            return
        features = (1.0, float(sequences), float(uncovered), pairs(uncovered, cached))
        expected = self._predict(self._fit, features)
        self._factors.setdefault(worker, Window(1.0)).add(ttft_ms / expected if expected > 0.0 else 1.0)
        weight = 1.0
        if self.learned and abs(ttft_ms - expected) > _OUTLIER * max(ttft_ms, expected):
            weight = _OUTLIER_WEIGHT
        for row in self._matrix:
            row[:] = [value * _FORGET for value in row]
        self._vector = [value * _FORGET for value in self._vector]
        self._add(features, ttft_ms, weight)
        self._samples += 1
        self._fit = TtftCoefficients(*_non_negative(self._matrix, self._vector))

    def coefficients(self, worker: WorkerId) -> TtftCoefficients:
        """What to predict with for `worker`."""
        own = self._factors.get(worker)
        if own is None or not own.learned or abs(own.value - 1.0) <= _DEVIATION:
            return self._fit
        return self._fit.scaled(own.value)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._factors.pop(worker, None)

    @staticmethod
    def _predict(fit: TtftCoefficients, features: Sequence[float]) -> float:
        weights = (fit.overhead_ms, fit.per_sequence_ms, fit.per_token_ms, fit.per_mpair_ms)
        return sum(w * f for w, f in zip(weights, features, strict=True))

    def _add(self, features: Sequence[float], ttft_ms: float, weight: float) -> None:
        scale = weight / max(ttft_ms, _SHORTEST_MS) ** 2
        for i, left in enumerate(features):
            row = self._matrix[i]
            for j, right in enumerate(features):
                row[j] += scale * left * right
            self._vector[i] += scale * left * ttft_ms


def _non_negative(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Least squares with no negative coefficient: the most negative one is fixed at 0 until none is left."""
    free = list(range(len(vector)))
    while free:
        solution = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
        worst = min(range(len(free)), key=solution.__getitem__)
        if solution[worst] >= 0.0:
            out = [0.0] * len(vector)
            for index, value in zip(free, solution, strict=True):
                out[index] = value
            return out
        del free[worst]
    return [0.0] * len(vector)


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination with a little ridge, scaled to the diagonal, so that it always has a solution."""
    size = len(vector)
    rows = [[*matrix[i], vector[i]] for i in range(size)]
    for i in range(size):
        rows[i][i] = rows[i][i] * (1.0 + _RIDGE) + 1e-300
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    out = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * out[j] for j in range(i + 1, size))
        out[i] = (rows[i][size] - rest) / rows[i][i]
    return out
