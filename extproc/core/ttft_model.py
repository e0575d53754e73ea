"""Time to first token as a function of work, learned while running.

For a request that finds nothing queued ahead of it:

    ttft_ms = overhead + busy * min(n, 1) + per_sequence * n
              + per_token * u + per_mpair * (u * c + u^2 / 2) / 1e6

u uncovered prompt tokens, c cached ones before them, n sequences running on the worker. The first three terms
are what a request waits for whatever its length (network, its own step's fixed cost, the rest of the step
under way if there is one, the decodes in both); the fourth is the linear part of prefill; the last is
attention, which reads everything before each token. The shape is the usual one of a step's cost: see
`extproc.sim.time_model`.

The coefficients are fitted online over the requests of a pool (see `extproc.core.least_squares`). A worker
that is consistently faster or slower than its pool by more than 50 % gets a factor of its own: noise between
equal workers must not make one look better, and prompts leave it, for ever.
"""

from dataclasses import dataclass

from extproc.core.estimators import Window
from extproc.core.least_squares import OnlineFit
from extproc.core.types import WorkerId

_MPAIR = 1e6
_DEVIATION = 0.5
_ENOUGH = 15
_EXAMPLES = ((0, 0, 0), (0, 0, 1), (0, 0, 8), (2000, 0, 0), (2000, 20_000, 0))  # uncovered, cached, sequences


@dataclass(frozen=True, slots=True)
class TtftCoefficients:
    """See the module. Milliseconds."""

    overhead_ms: float
    per_sequence_ms: float
    per_token_ms: float
    per_mpair_ms: float
    busy_ms: float = 0.0

    def wait_ms(self, sequences: float) -> float:
        """What a request waits for whatever its length."""
        busy = min(1.0, sequences)
        return self.overhead_ms + self.busy_ms * busy + self.per_sequence_ms * sequences

    def prefill_ms(self, uncovered: float, cached: float) -> float:
        """Computing `uncovered` tokens behind `cached` ones."""
        linear_ms = self.per_token_ms * uncovered
        return linear_ms + self.per_mpair_ms * pairs(uncovered, cached) if self.per_mpair_ms else linear_ms

    def scaled(self, factor: float) -> "TtftCoefficients":
        """The same shape, slower by `factor`."""
        return TtftCoefficients(
            self.overhead_ms * factor,
            self.per_sequence_ms * factor,
            self.per_token_ms * factor,
            self.per_mpair_ms * factor,
            self.busy_ms * factor,
        )


def pairs(uncovered: float, cached: float) -> float:
    """Millions of (token, earlier token) pairs that attention goes through."""
    return (uncovered * cached + uncovered * uncovered / 2.0) / _MPAIR


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
        self._fit = OnlineFit(
            (prior.overhead_ms, prior.per_sequence_ms, prior.per_token_ms, prior.per_mpair_ms, prior.busy_ms),
            [_features(*example) for example in _EXAMPLES],
        )
        self._coefficients = prior
        self._factors: dict[WorkerId, Window] = {}

    @property
    def learned(self) -> bool:
        """Whether the fit rests on samples rather than on the prior."""
        return self._fit.settled

    def observe(
        self, worker: WorkerId, *, uncovered: int, cached: int, sequences: int, ttft_ms: float
    ) -> None:
        """A request that found nothing queued ahead of it had its first token after `ttft_ms`."""
        if ttft_ms <= 0.0 or uncovered < 0:
            return
        features = _features(uncovered, cached, sequences)
        expected = self._fit.predict(features)
        self._factors.setdefault(worker, Window(1.0, enough=_ENOUGH)).add(
            ttft_ms / expected if expected > 0.0 else 1.0
        )
        self._fit.observe(features, ttft_ms)
        self._coefficients = TtftCoefficients(*self._fit.coefficients)

    @property
    def typical(self) -> TtftCoefficients:
        """What to predict with for a worker that is like the others."""
        return self._coefficients

    def coefficients(self, worker: WorkerId) -> TtftCoefficients:
        """What to predict with for `worker`."""
        own = self._factors.get(worker)
        if own is None or not own.learned or abs(own.value - 1.0) <= _DEVIATION:
            return self._coefficients
        return self._coefficients.scaled(own.value)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._factors.pop(worker, None)


def _features(uncovered: int, cached: int, sequences: int) -> tuple[float, ...]:
    return (1.0, float(sequences), float(uncovered), pairs(uncovered, cached), float(min(sequences, 1)))
