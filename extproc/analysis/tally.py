"""Counts by group and by size, of bounded memory."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

MOST_GROUPS = 512
OTHERS = "(others)"

LENGTHS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 1048576)
"""Upper bounds, in tokens, of the buckets of lengths."""
AGES = (1.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 6 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""Upper bounds, in seconds, of the buckets of ages."""


class Buckets:
    """How often values fell between bounds. A bucket holds what is at most its bound, the last the rest."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1

    @property
    def total(self) -> int:
        """Values counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The bound below which `share` of the values lie; None without values."""
        total, running = self.total, 0
        for at, count in enumerate(self.counts):
            running += count
            if total and running >= share * total:
                return self.bounds[min(at, len(self.bounds) - 1)]
        return None


@dataclass(slots=True)
class Group:
    """Requests of one tenant, class, template or model, their tokens, and which of those repeat."""

    requests: int = 0
    tokens: int = 0
    repeated: int = 0
    random_hits: int = 0
    prefix_hits: int = 0
    lost: float = 0.0

    def add(self, tokens: int, repeated: int, random_hits: int, prefix_hits: int, lost: float) -> None:
        """Count one request."""
        self.requests += 1
        self.tokens += tokens
        self.repeated += repeated
        self.random_hits += random_hits
        self.prefix_hits += prefix_hits
        self.lost += lost


class Groups:
    """Groups by name; of more than `MOST_GROUPS` names the later ones are counted together."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.merged = 0

    def of(self, name: str) -> Group:
        """The group of that name, or that of the others."""
        group = self.groups.get(name)
        if group is None:
            if len(self.groups) >= MOST_GROUPS:
                self.merged += 1
                name = OTHERS
            group = self.groups.setdefault(name, Group())
        return group

    def largest(self, count: int) -> list[tuple[str, Group]]:
        """The groups with most tokens."""
        return sorted(self.groups.items(), key=lambda item: (-item[1].tokens, item[0]))[:count]
