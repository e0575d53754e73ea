"""Online least squares for times: non-negative, forgetting, robust.

    y = sum of coefficient * feature

Errors count relative to the expected value, so small times matter as much as large ones; relative to the
measured one, the fit would be drawn to what happens to be small. A sample that is more than twice or less
than half of what is expected counts little. Old samples fade exponentially, and no coefficient is negative.

What is expected of the first samples is a prior that may be far off. So they are kept, and each fit is made
anew from all of them (iteratively reweighted least squares), beginning with the prior in the size that their
median says. The prior itself stays in the fit as examples, which weigh little, and less where it is too low.
"""

from collections.abc import Sequence
from operator import mul
from statistics import median

_FORGET = 0.99  # per sample: a memory of about a hundred
_OUTLIER = 0.5
_OUTLIER_WEIGHT = 0.05
_SETTLED = 20
_PRIOR_WEIGHT = 0.05  # of a sample
_PRIOR_VOTES = 3  # samples that it takes to outvote the prior on its size
_ROUNDS = 3  # of reweighting
_RIDGE = 1e-6
_SMALLEST = 0.1

_Sample = tuple[Sequence[float], float]


class OnlineFit:
    """One fit.

    Args:
        prior: coefficients until there are samples.
        examples: feature vectors at which the prior is worth a little of a sample each.
    """

    def __init__(self, prior: Sequence[float], examples: Sequence[Sequence[float]]) -> None:
        self.coefficients: tuple[float, ...] = tuple(prior)
        self._prior = self.coefficients
        self._examples = examples
        self._first: list[_Sample] = []
        self._settled = False
        self._clear()

    @property
    def settled(self) -> bool:
        """Whether the fit rests on samples rather than on the prior."""
        return self._settled

    def predict(self, features: Sequence[float]) -> float:
        """The value the fit expects."""
        return _value(self.coefficients, features)

    def observe(self, features: Sequence[float], value: float) -> None:
        """One sample; `value` must be positive."""
        if self._settled:
            self._take(features, value, _FORGET)
            self.coefficients = tuple(non_negative(self._matrix, self._vector))
            return
        self._first.append((features, value))
        self._begin(self._first)
        if len(self._first) == _SETTLED:
            self._first, self._settled = [], True

    def _begin(self, samples: Sequence[_Sample]) -> None:
        """Fit the first samples, all of them again."""
        ratios = [value / max(_value(self._prior, features), _SMALLEST) for features, value in samples]
        size = median([*ratios, *[1.0] * _PRIOR_VOTES])
        self.coefficients = tuple(size * coefficient for coefficient in self._prior)
        for _ in range(_ROUNDS):
            self._clear()
            for features in self._examples:
                value = _value(self._prior, features)
                self._add(features, value, _PRIOR_WEIGHT, max(1.0, size) * value)
            for features, value in samples:
                self._take(features, value)
            self.coefficients = tuple(non_negative(self._matrix, self._vector))

    def _clear(self) -> None:
        size = len(self._prior)
        self._matrix = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size

    def _take(self, features: Sequence[float], value: float, keep: float = 1.0) -> None:
        expected = self.predict(features)
        if abs(value - expected) > _OUTLIER * max(value, expected):
            self._add(features, value, _OUTLIER_WEIGHT, max(value, expected), keep)
        else:
            self._add(features, value, 1.0, expected, keep)

    def _add(
        self, features: Sequence[float], value: float, weight: float, size: float, keep: float = 1.0
    ) -> None:
        """Take in a sample; what there was before it is kept by so much."""
        scale = weight / max(size, _SMALLEST) ** 2
        vector = self._vector
        for i, left in enumerate(features):
            scaled = scale * left
            row = self._matrix[i]
            row[:] = [cell * keep + scaled * right for cell, right in zip(row, features, strict=True)]
            vector[i] = vector[i] * keep + scaled * value


def _value(coefficients: Sequence[float], features: Sequence[float]) -> float:
    value: float = sum(map(mul, coefficients, features))
    return value


def non_negative(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Solution of the normal equations without negative coefficients.

    The most negative one is fixed at 0 until none is left.
    """
    free = list(range(len(vector)))
    while free:
        solution = _solve([[*[matrix[i][j] for j in free], vector[i]] for i in free])
        least = min(solution)
        if least >= 0.0:
            out = [0.0] * len(vector)
            for index, value in zip(free, solution, strict=True):
                out[index] = value
            return out
        del free[solution.index(least)]
    return [0.0] * len(vector)


def _solve(rows: list[list[float]]) -> list[float]:
    """Gaussian elimination with a little ridge, scaled to the diagonal, so that it always has a solution.

    Each row is one of the matrix and its entry of the vector; they are used up.
    """
    size = len(rows)
    for i, row in enumerate(rows):
        row[i] = row[i] * (1.0 + _RIDGE) + 1e-300
    for i in range(size):
        pivot, largest = i, abs(rows[i][i])
        for r in range(i + 1, size):
            if abs(rows[r][i]) > largest:
                pivot, largest = r, abs(rows[r][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        above = rows[i]
        columns = range(i + 1, size + 1)  # what is left of them is not read again
        for row in rows[i + 1 :]:
            factor = row[i] / above[i]
            for j in columns:
                row[j] -= factor * above[j]
    out = [0.0] * size
    for i in range(size - 1, -1, -1):
        row = rows[i]
        rest = 0.0
        for j in range(i + 1, size):
            rest += row[j] * out[j]
        out[i] = (row[size] - rest) / row[i]
    return out
