"""Drawing lengths and times that look like those of a trace."""

from bisect import bisect_right
from collections.abc import Sequence
from random import Random


class Quantiles:
    """A distribution given by some of its quantiles, linear in between.

    Args:
        points: (share, value) pairs, both ascending, from share 0 to share 1.

    Raises:
        ValueError: they do not ascend, or do not begin at 0 and end at 1.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        shares = [share for share, _ in points]
        values = [value for _, value in points]
        if shares[0] != 0 or shares[-1] != 1 or sorted(shares) != shares or sorted(values) != values:
            raise ValueError(f"{points} are not quantiles from 0 to 1")
        self._shares = shares
        self._values = values

    def draw(self, rng: Random) -> float:
        """One value."""
        share = rng.random()
        right = min(bisect_right(self._shares, share), len(self._shares) - 1)
        low, high = self._shares[right - 1], self._shares[right]
        below, above = self._values[right - 1], self._values[right]
        return below + (above - below) * (share - low) / (high - low)

    def tokens(self, rng: Random) -> int:
        """One value as a count of tokens, at least 1."""
        return max(1, round(self.draw(rng)))
