"""Coefficients of the `TimeModel` from measured times of a real engine.

Every time a client measures of an otherwise idle engine is a sum of known amounts of work:

    ms = request_ms           * requests             (HTTP, validation, detokenization: outside the steps)
       + request_ms_per_token * their prompt tokens  (parsing and hashing the prompt)
       + base_ms              * steps
       + ... the other terms of `TimeModel.step_s`, summed over the steps

so the coefficients follow from a set of observations by linear least squares. Errors are weighed relative to
the time measured (an error of 1 ms matters in 5 ms and not in 500), and no coefficient may be negative: of
all sets of coefficients that are left at zero, the best feasible one wins, which with eight of them is exact
and cheap. No numerical library is needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from extproc.core.errors import WarmrouteError
from extproc.sim.time_model import TimeModel

_LEAST_BASE_MS = 1e-3  # a TimeModel needs a step to take time


class TimeFitError(WarmrouteError):
    """The observations do not determine the coefficients; the message says what is missing."""


class Work(NamedTuple):
    """What an engine did in a measured time. The order of the fields is that of the coefficients."""

    requests: int = 0
    request_tokens: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    decodes: int = 0
    context_tokens: int = 0


class Observation(NamedTuple):
    """Work and how long it took."""

    work: Work
    ms: float


@dataclass(frozen=True, slots=True)
class FittedTime:
    """An engine's speed as its clients see it.

    Attributes:
        time: of the engine's steps.
        request_ms: of a request outside the steps.
        request_ms_per_token: of each token of its prompt outside the steps.
    """

    time: TimeModel
    request_ms: float
    request_ms_per_token: float

    def outside_s(self, prompt_tokens: int) -> float:
        """Seconds a request spends outside the engine's steps before its first token is seen."""
        return (self.request_ms + self.request_ms_per_token * prompt_tokens) / 1000.0

    def predict_ms(self, work: Work) -> float:
        """Milliseconds that `work` takes on an otherwise idle engine."""
        coefficients = (
            self.request_ms,
            self.request_ms_per_token,
            self.time.base_ms,
            self.time.prefill_ms_per_token,
            self.time.attention_ms_per_pair,
            self.time.decode_ms_per_sequence,
            self.time.context_ms_per_token,
        )
        return sum(c * amount for c, amount in zip(coefficients, work, strict=True))


def first_token_work(prompt_tokens: int, cached_tokens: int, step_tokens: int) -> Work:
    """What it takes until the first token of a request that is alone on the engine.

    Args:
        prompt_tokens: of the prompt.
        cached_tokens: of them found in the prefix cache; below `prompt_tokens`.
        step_tokens: the engine's token budget of a step (`max_num_batched_tokens`).

    Raises:
        ValueError: nothing is left to compute, or the budget is below 1.
    """
    left = prompt_tokens - cached_tokens
    if left < 1 or step_tokens < 1:
        raise ValueError(f"{left} tokens to compute with {step_tokens} a step: both must be at least 1")
    # Each token attends to every one before it, whatever the chunks.
    pairs = left * cached_tokens + left * (left - 1) / 2
    return Work(1, prompt_tokens, -(-left // step_tokens), left, pairs)


def decode_work(contexts: Sequence[int]) -> Work:
    """One step in which every one of these sequences, of so many tokens each, gets one more token."""
    return Work(steps=1, decodes=len(contexts), context_tokens=sum(contexts))


def fit(observations: Iterable[Observation]) -> FittedTime:
    """The coefficients that come closest to what was observed.

    Raises:
        TimeFitError: an observation took no time, or there are too few different ones.
    """
    data = list(observations)
    if any(not one.ms > 0 for one in data):
        raise TimeFitError("an observation took no time; measure again")
    rows = [[amount / one.ms for amount in one.work] for one in data]
    names = Work._fields
    # Columns of unit size keep the equations well conditioned: pairs are millions, steps are ones.
    scales = [max((abs(row[i]) for row in rows), default=0.0) for i in range(len(names))]
    missing = [name for name, scale in zip(names, scales, strict=True) if scale == 0]
    if missing:
        raise TimeFitError(f"no observation has any {', '.join(missing)}; measure some")
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    solution = _non_negative(scaled)
    if solution is None:
        raise TimeFitError(
            f"{len(data)} observations do not determine {len(names)} coefficients; vary lengths, "
            "cached tokens and concurrency"
        )
    found = [value / scale for value, scale in zip(solution, scales, strict=True)]
    request_ms, request_ms_per_token, base_ms, *rest = found
    return FittedTime(TimeModel(max(base_ms, _LEAST_BASE_MS), *rest), request_ms, request_ms_per_token)


def _non_negative(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The x >= 0 that brings every `row . x` closest to 1."""
    width = len(rows[0])
    best: tuple[float, list[float]] | None = None
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            part = _solve([[row[i] for i in columns] for row in rows])
            if part is None or min(part) < 0:
                continue
            solution = [0.0] * width
            for column, value in zip(columns, part, strict=True):
                solution[column] = value
            error = sum((sum(a * x for a, x in zip(row, solution, strict=True)) - 1) ** 2 for row in rows)
            if best is None or error < best[0]:
                best = error, solution
    full_rank = _solve(rows) is not None
    return best[1] if best is not None and full_rank else None


def _solve(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Least squares of `row . x = 1` by the normal equations; None if they have no single solution."""
    width = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(width)] + [sum(row[i] for row in rows)]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(width):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return [matrix[i][width] / matrix[i][i] for i in range(width)]
