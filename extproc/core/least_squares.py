"""Online least squares for times: non-negative, forgetting, robust.

    y = sum of coefficient * feature

Errors count relative to the expected value, so small times matter as much as large ones (relative to the
measured one, the fit would be drawn to what happens to be small); old samples fade exponentially; a sample
far off a settled fit counts little; no coefficient is negative. Until there are samples a prior stands in for
them, given as examples that weigh little.
"""

from collections.abc import Sequence

_FORGET = 0.99  # per sample: a memory of about a hundred
_OUTLIER = 0.5
_OUTLIER_WEIGHT = 0.05
_SETTLED = 20
_PRIOR_WEIGHT = 0.05  # of a sample
_RIDGE = 1e-6
_SMALLEST = 0.1


class OnlineFit:
    """One fit.

    Args:
        prior: coefficients until there are samples.
        examples: feature vectors at which the prior is worth a little of a sample each.
    """

    def __init__(self, prior: Sequence[float], examples: Sequence[Sequence[float]]) -> None:
        size = len(prior)
        self.coefficients: tuple[float, ...] = tuple(prior)
        self._matrix = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size
        self._samples = 0
        for features in examples:
            value = self.predict(features)
            self._add(features, value, _PRIOR_WEIGHT, value)

    @property
    def settled(self) -> bool:
        """Whether the fit rests on samples rather than on the prior."""
        return self._samples >= _SETTLED

    def predict(self, features: Sequence[float]) -> float:
        """The value the fit expects."""
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def observe(self, features: Sequence[float], value: float) -> None:
        """One sample; `value` must be positive."""
        weight, scale = 1.0, value
        if self.settled:
            scale = expected = self.predict(features)
            if abs(value - expected) > _OUTLIER * max(value, expected):
                weight, scale = _OUTLIER_WEIGHT, max(value, expected)
        for row in self._matrix:
            row[:] = [cell * _FORGET for cell in row]
        self._vector = [cell * _FORGET for cell in self._vector]
        self._add(features, value, weight, scale)
        self._samples += 1
        self.coefficients = tuple(non_negative(self._matrix, self._vector))

    def _add(self, features: Sequence[float], value: float, weight: float, size: float) -> None:
        scale = weight / max(size, _SMALLEST) ** 2
        for i, left in enumerate(features):
            row = self._matrix[i]
            for j, right in enumerate(features):
                row[j] += scale * left * right
            self._vector[i] += scale * left * value


def non_negative(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Solution of the normal equations without negative coefficients.

    The most negative one is fixed at 0 until none is left.
    """
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
