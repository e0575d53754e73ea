"""Time per output token as a function of load, learned while running.

    tpot_ms = base + per_sequence * n + per_1k_context * context / 1000

n sequences in the batch, context the tokens of KV they read, both as they were on average while the request
was decoding. A decode step reads the weights once (base) and each sequence's context, so its time grows with
both: this is what one request more costs those that run, and what they cost it. Fitted online per pool from
finished streams (see `extproc.core.least_squares`).
"""

from dataclasses import dataclass

from extproc.core.least_squares import OnlineFit

_EXAMPLES = ((0, 0), (16, 0), (0, 50_000))  # sequences, context


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """See the module. Milliseconds per output token."""

    base_ms: float
    per_sequence_ms: float
    per_1k_context_ms: float

    def tpot_ms(self, sequences: float, context_tokens: float) -> float:
        """Time per output token at this load."""
        return (
            self.base_ms + self.per_sequence_ms * sequences + self.per_1k_context_ms * context_tokens / 1000
        )


class StepModels:
    """A model for each pool: pools serve different models on different machines."""

    def __init__(self, prior: StepCoefficients) -> None:
        self._prior = prior
        self._pools: dict[str, StepModel] = {}

    def of(self, pool: str) -> "StepModel":
        """The pool's model."""
        model = self._pools.get(pool)
        if model is None:
            model = self._pools[pool] = StepModel(self._prior)
        return model


class StepModel:
    """One pool's fit.

    Args:
        prior: coefficients until there are samples.
    """

    def __init__(self, prior: StepCoefficients) -> None:
        self._fit = OnlineFit(
            (prior.base_ms, prior.per_sequence_ms, prior.per_1k_context_ms),
            [_features(*example) for example in _EXAMPLES],
        )
        self.coefficients = prior

    def observe(self, *, sequences: float, context_tokens: float, tpot_ms: float) -> None:
        """A stream has ended that took `tpot_ms` per output token after its first."""
        if tpot_ms > 0.0:
            self._fit.observe(_features(sequences, context_tokens), tpot_ms)
            self.coefficients = StepCoefficients(*self._fit.coefficients)


def _features(sequences: float, context_tokens: float) -> tuple[float, ...]:
    return (1.0, float(sequences), context_tokens / 1000.0)
