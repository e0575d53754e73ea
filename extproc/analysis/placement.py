"""What a fleet's prefix caches would have hit, had the logged prompts gone there: sizes, replicas, placement.

Each replica's cache is vLLM's: full blocks only, at least the last token of a prompt always computed, the
least recently used block evicted first and of one prompt the last block first. Prompts pass one after another
(none is running while another comes), and only prompts are cached, not the answers, so a real engine that
also keeps its answers hits a little more in conversations.

Placements: `random` (what round robin and least-connections amount to for a prefix), and `prefix` (the
longest hit among the replicas whose recent computed tokens are within `LOAD_BOUND` times the mean and
`LOAD_SLACK` tokens, ties to the least loaded).
"""

import heapq
from collections.abc import Sequence
from random import Random

from extproc.analysis.prefix_tree import Node

LOAD_BOUND = 1.25
LOAD_SLACK = 8_192
_HALF_LIFE = 64  # requests per replica after which load counts half


def blocks_between(start: int, end: int, block_size: int) -> int:
    """Blocks that end within tokens `start` (exclusive) to `end` (inclusive)."""
    return end // block_size - start // block_size


class BlockCache:
    """One replica's cache of tree nodes: which of a node's blocks are there, counted from its first."""

    __slots__ = ("_block_size", "_cached", "_capacity", "_heap", "_pushed", "held")

    def __init__(self, capacity_blocks: int, block_size: int) -> None:
        self._capacity = capacity_blocks
        self._block_size = block_size
        self._cached: dict[Node, list[int]] = {}  # blocks, last use, start
        self._heap: list[tuple[int, int, int, Node]] = []
        self._pushed = 0
        self.held = 0

    def hit_blocks(self, path: Sequence[Node]) -> int:
        """Full blocks of the prompt that are there, from its beginning."""
        size, cached = self._block_size, self._cached
        hit = 0
        for node in path:
            end = node.start + len(node.run) // 4
            blocks = end // size - node.start // size
            if not blocks:
                continue
            entry = cached.get(node)
            if entry is None:
                return hit
            hit += entry[0]
            if entry[0] < blocks:
                return hit
        return hit

    def store(self, path: Sequence[Node], now: int) -> None:
        """The prompt is computed: all its full blocks are there, as far as they fit. `now` ascends."""
        size, cached = self._block_size, self._cached
        for node in path:
            end = node.start + len(node.run) // 4
            blocks = end // size - node.start // size
            if not blocks:
                continue
            entry = cached.get(node)
            if entry is None:
                cached[node] = [blocks, now, node.start]
                self.held += blocks
                self._push(node, now)
            else:
                self.held += blocks - entry[0]
                entry[0] = blocks
                entry[1] = now
        if self.held > self._capacity:
            self._evict()

    def split(self, upper: Node, lower: Node) -> None:
        """A node was split: so are its blocks."""
        entry = self._cached.get(lower)
        if entry is None:
            return
        blocks, last, _ = entry
        above = min(blocks, blocks_between(upper.start, lower.start, self._block_size))
        if above:
            self._cached[upper] = [above, last, upper.start]
            self._push(upper, last)
        if blocks > above:
            entry[0], entry[2] = blocks - above, lower.start
            self._push(lower, last)
        else:
            del self._cached[lower]

    def _push(self, node: Node, last: int) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (last, -node.start, self._pushed, node))

    def _evict(self) -> None:
        heap, cached = self._heap, self._cached
        while self.held > self._capacity:
            last, start, _, node = heapq.heappop(heap)
            entry = cached.get(node)
            if entry is None or entry[2] != -start:
                continue
            if entry[1] != last:
                self._pushed += 1
                heapq.heappush(heap, (entry[1], start, self._pushed, node))
                continue
            surplus = self.held - self._capacity
            if entry[0] > surplus:
                entry[0] -= surplus
                self.held -= surplus
                self._pushed += 1
                heapq.heappush(heap, (last, start, self._pushed, node))
            else:
                self.held -= entry[0]
                del cached[node]


class Fleet:
    """Replicas with caches of one size under one placement.

    Args:
        replicas: how many.
        capacity_blocks: KV blocks of each.
        block_size: tokens per block.
        rng: for ties of load.
    """

    def __init__(self, replicas: int, capacity_blocks: int, block_size: int, rng: Random) -> None:
        self._block_size = block_size
        self._rng = rng
        self._caches = [BlockCache(capacity_blocks, block_size) for _ in range(replicas)]
        self._load = [0.0] * replicas
        self._growth = 1.0  # instead of letting every load decay, what comes weighs ever more
        self._step = 2.0 ** (1.0 / (_HALF_LIFE * replicas))
        self._clock = 0
        self.computed = [0] * replicas
        self.hit_tokens = 0
        self.input_tokens = 0

    def route(self, path: Sequence[Node], length: int, at: int | None = None) -> int:
        """Place one prompt of `length` tokens on replica `at`, or by prefix; returns the tokens it hits."""
        self._clock += 1
        most = max(0, length - 1) // self._block_size
        if at is None:
            hits = [cache.hit_blocks(path) for cache in self._caches]
            at = self._choose(hits)
            hit = min(hits[at], most)
        else:
            hit = min(self._caches[at].hit_blocks(path), most)
        tokens = hit * self._block_size
        self._caches[at].store(path, self._clock)
        self._load[at] += (length - tokens) * self._growth
        self._growth *= self._step
        if self._growth > 1e100:
            self._load = [load / self._growth for load in self._load]
            self._growth = 1.0
        self.computed[at] += length - tokens
        self.hit_tokens += tokens
        self.input_tokens += length
        return tokens

    def split(self, upper: Node, lower: Node) -> None:
        """See `BlockCache.split`."""
        for cache in self._caches:
            cache.split(upper, lower)

    @property
    def imbalance(self) -> float:
        """Tokens computed by the busiest replica, over the mean; 1 is even."""
        total = sum(self.computed)
        return max(self.computed) * len(self.computed) / total if total else 1.0

    def _choose(self, hits: list[int]) -> int:
        load = self._load
        bound = LOAD_BOUND * sum(load) / len(load) + LOAD_SLACK * self._growth
        lowest = min(load)
        free = [at for at in range(len(hits)) if load[at] <= bound or load[at] == lowest]
        best = max(hits[at] for at in free)
        finalists = [at for at in free if hits[at] == best]
        least = min(load[at] for at in finalists)
        return self._rng.choice([at for at in finalists if load[at] == least])
