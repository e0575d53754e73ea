"""What workers have of a request's prompts: the index's claims, less what is doubted of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from extproc.core.doubts import Doubts
from extproc.core.kv_index import KvIndex, Match
from extproc.core.types import WorkerId
from extproc.core.worker_table import WorkerState

Chains = dict[int, tuple[tuple[int, ...], ...]]
"""Block hashes of a request's prompts, by block size."""


class Hit(NamedTuple):
    """What one worker has of a prompt, in tokens: predicted on the GPU and in slower tiers, and doubted."""

    cached: int
    offloaded: int
    doubtful: int
    odds: float  # share of `doubtful` to count on

    def plus(self, other: "Hit") -> "Hit":
        """Together with the hit of another prompt of the same request."""
        doubtful = self.doubtful + other.doubtful
        odds = (self.doubtful * self.odds + other.doubtful * other.odds) / doubtful if doubtful else 1.0
        return Hit(self.cached + other.cached, self.offloaded + other.offloaded, doubtful, odds)


NOTHING = Hit(0, 0, 0, 1.0)


class Hits(NamedTuple):
    """What was found.

    Attributes:
        of: what each worker that holds a prefix has of the request, all its prompts together.
        chains: the block hashes that found it.
        sizes: tokens per block, of those workers.
    """

    of: dict[WorkerId, Hit]
    chains: Chains
    sizes: dict[WorkerId, int]


def look_up(
    index: KvIndex,
    doubts: Doubts,
    chains: Chains,
    size_of: Callable[[WorkerId], int | None],
    state_of: Callable[[WorkerId], WorkerState | None],
    now: float,
) -> Hits:
    """Find out who has what of some prompts.

    Args:
        index: knows who claims to hold what.
        doubts: knows what of it is doubted.
        chains: of the prompts, for every block size among the workers.
        size_of: tells a worker's tokens per block.
        state_of: tells the state of a worker that may serve the request; None for others.
        now: the time.
    """
    found = Hits({}, chains, {})
    of, sizes = found.of, found.sizes
    for size, prompts in chains.items():
        for hashes in prompts:
            alike: dict[tuple[int, int], Hit] = {}
            for match in index.match(hashes):
                worker = match.worker
                state = state_of(worker) if size_of(worker) == size else None
                if state is None:
                    continue
                if state.kv_suspended:  # it may have restarted, empty: what was sent there since is there
                    if not match.sent:
                        continue
                    hit = Hit(match.sent * size, 0, 0, 1.0)
                elif worker in doubts:
                    hit = _believed(doubts, match, hashes, size, now)
                else:
                    length = (match.blocks, match.offloaded)
                    hit = alike.get(length) or alike.setdefault(
                        length, Hit(match.blocks * size, match.offloaded * size, 0, 1.0)
                    )
                before = of.get(worker)
                of[worker] = hit if before is None else before.plus(hit)
                sizes[worker] = size
    return found


def _believed(doubts: Doubts, match: Match, hashes: Sequence[int], size: int, now: float) -> Hit:
    """What a match is worth when what is doubted is left out of it."""
    claimed = match.blocks + match.offloaded
    sure, odds = doubts.believed(match.worker, hashes, claimed, match.sent, now)
    cached = min(match.blocks, sure)
    return Hit(cached * size, (sure - cached) * size, (claimed - sure) * size, odds)
