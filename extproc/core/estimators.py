"""What we learn while running, apart from times (see `extproc.core.ttft_model`): output lengths.

Estimates are medians over a bounded window of recent samples: robust to outliers, forgetting by
themselves, and a configured prior until there are enough samples.
"""

from collections import deque
from statistics import median

_WINDOW = 31
_ENOUGH = 5


class Window:
    """The median of the last `size` samples; the prior until `enough` of them were seen."""

    __slots__ = ("_cached", "_enough", "_prior", "_samples")

    def __init__(self, prior: float, size: int = _WINDOW, enough: int = _ENOUGH) -> None:
        self._samples: deque[float] = deque(maxlen=size)
        self._prior = prior
        self._enough = enough
        self._cached: float | None = None

    def add(self, sample: float) -> None:
        """Record a sample."""
        self._samples.append(sample)
        self._cached = None

    @property
    def learned(self) -> bool:
        """Whether `value` comes from samples."""
        return len(self._samples) >= self._enough

    @property
    def value(self) -> float:
        """The estimate."""
        if not self.learned:
            return self._prior
        if self._cached is None:
            self._cached = float(median(self._samples))
        return self._cached


class ReuseShares:
    """Share of prompt tokens that engines found in their caches, per pool, over about 200 requests."""

    _FADE = 0.995

    def __init__(self) -> None:
        self._pools: dict[str, tuple[float, float]] = {}

    def observe(self, pool: str, prompt_tokens: int, cached_tokens: int) -> None:
        """An engine found `cached_tokens` of a prompt."""
        prompt, cached = self._pools.get(pool, (0.0, 0.0))
        self._pools[pool] = (prompt * self._FADE + prompt_tokens, cached * self._FADE + cached_tokens)

    def of(self, pool: str) -> float:
        """The share, 0 to 1; 0 until anything is known."""
        prompt, cached = self._pools.get(pool, (0.0, 0.0))
        return min(1.0, cached / prompt) if prompt > 0.0 else 0.0


class OutputLengths:
    """Median number of generated tokens per model."""

    _MAX_MODELS = 1024

    def __init__(self, prior_tokens: float) -> None:
        self._prior = prior_tokens
        self._models: dict[str, Window] = {}

    def observe(self, model: str, tokens: int) -> None:
        """A request for `model` ended by itself after `tokens` generated tokens."""
        window = self._models.get(model)
        if window is None:
            if len(self._models) >= self._MAX_MODELS:
                self._models.pop(next(iter(self._models)))
            window = self._models[model] = Window(self._prior)
        window.add(tokens)

    def expected(self, model: str, limit: int | None, hint: int | None = None) -> float:
        """Tokens a request for `model` will generate: as hinted, else as learned; at most `limit`."""
        window = self._models.get(model)
        value = self._prior if window is None else window.value
        if hint is not None:
            value = float(hint)
        return value if limit is None else min(value, float(limit))
