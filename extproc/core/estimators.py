"""Small estimators: a median that forgets, and how much of what is asked was asked before.

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
