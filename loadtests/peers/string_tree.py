"""The approximate radix tree of sglang-router, smg and Ray: which worker was sent which beginning of a text.

Theory of operation. Nodes hold a stretch of text each; a path from the root spells a prompt. A node knows the
workers ("tenants") whose prompts pass through it, with the epoch of the last prompt that ended at it, and the
worker that created it, which answers for it as long as it is still there. Inserting splits a node where texts
part; the upper half inherits the workers of the lower. Each worker's size is the length of its stretches.
Eviction takes, for every worker above the limit, its least recently ended leaves until it is below.

Mapping. Peers work on characters. Here the letters are the engine's blocks, by their chained hashes, each of
`block_size` tokens of 4 characters; so texts part at the block in which they differ. A prompt's last tokens
that fill no block are no part of the tree. As hashes are chained, two stretches at one depth agree on all
before the last place where they are equal: their common length is found by bisection.

Source: sglang `sgl-model-gateway/src/policies/tree.rs`, smg `crates/kv_index/src/string_tree.rs`.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

CHARACTERS_PER_TOKEN = 4


class _Node:
    __slots__ = ("blocks", "children", "creator", "ended", "parent")

    def __init__(self, blocks: tuple[int, ...], parent: "_Node | None", creator: int | None) -> None:
        self.blocks = blocks
        self.parent = parent
        self.creator = creator
        self.children: dict[int, _Node] = {}
        self.ended: dict[int, int] = {}  # worker -> epoch at which a prompt of its last ended here, or 0

    def is_leaf_of(self, worker: int) -> bool:
        return worker in self.ended and not any(worker in child.ended for child in self.children.values())


class Match(NamedTuple):
    """How much of a prompt is known, and whose that is."""

    blocks: int
    worker: int | None
    workers: tuple[int, ...]  # everyone at the node where it ended


class StringTree:
    """See the module's docstring.

    Attributes:
        sizes: characters by worker.
    """

    def __init__(self, replicas: int, block_size: int) -> None:
        self._characters = block_size * CHARACTERS_PER_TOKEN
        self._root = _Node((), None, None)
        self._root.ended = dict.fromkeys(range(replicas), 0)
        self._epoch = 0
        self.sizes = [0] * replicas

    def insert(self, blocks: Sequence[int], worker: int) -> None:
        """`worker` was sent this prompt."""
        node, at = self._root, 0
        while at < len(blocks):
            child = node.children.get(blocks[at])
            if child is None:
                leaf = _Node(tuple(blocks[at:]), node, worker)
                node.children[blocks[at]] = leaf
                self._join(leaf, worker)
                node = leaf
                break
            common = _common(child.blocks, blocks, at)
            if common < len(child.blocks):
                child = self._split(child, common)
            self._join(child, worker)
            node, at = child, at + common
        self._epoch += 1
        node.ended[worker] = self._epoch

    def match(self, blocks: Sequence[int]) -> Match:
        """The longest beginning of this prompt that anybody was sent."""
        node, at = self._root, 0
        while at < len(blocks):
            child = node.children.get(blocks[at])
            if child is None:
                break
            common = _common(child.blocks, blocks, at)
            node, at = child, at + common
            if common < len(child.blocks):
                break
        if node.creator not in node.ended:
            node.creator = next(iter(node.ended), None)
        return Match(at, node.creator, tuple(node.ended))

    def evict(self, max_characters: int) -> None:
        """Bring every worker down to `max_characters`."""
        if max(self.sizes) <= max_characters:
            return
        leaves = [(epoch, order, worker, node) for order, (epoch, worker, node) in enumerate(self._leaves())]
        heapify(leaves)
        order = len(leaves)
        while leaves:
            _, _, worker, node = heappop(leaves)
            if self.sizes[worker] <= max_characters or not node.is_leaf_of(worker):
                continue
            parent = self._forget(node, worker)
            if parent is not self._root and parent.is_leaf_of(worker):
                order += 1
                heappush(leaves, (parent.ended[worker], order, worker, parent))

    def _leaves(self) -> Iterator[tuple[int, int, _Node]]:
        """Every worker's leaves, with the epochs at which they last ended a prompt."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for worker, epoch in node.ended.items():
                if node.is_leaf_of(worker):
                    yield epoch, worker, node

    def _forget(self, node: _Node, worker: int) -> _Node:
        """Take `worker` from a node below the root, and the node from the tree if it was the last."""
        self.sizes[worker] -= len(node.blocks) * self._characters
        del node.ended[worker]
        parent = node.parent or self._root
        if not node.ended and not node.children:
            del parent.children[node.blocks[0]]
        return parent

    def _join(self, node: _Node, worker: int) -> None:
        if worker not in node.ended:
            node.ended[worker] = 0
            self.sizes[worker] += len(node.blocks) * self._characters

    @staticmethod
    def _split(node: _Node, at: int) -> _Node:
        """Cut `node` after `at` blocks; the new upper half is returned."""
        parent = node.parent
        upper = _Node(node.blocks[:at], parent, node.creator)
        upper.ended = node.ended.copy()
        upper.children[node.blocks[at]] = node
        if parent is not None:
            parent.children[node.blocks[0]] = upper
        node.blocks = node.blocks[at:]
        node.parent = upper
        return upper


def _common(stretch: Sequence[int], blocks: Sequence[int], at: int) -> int:
    """How many of a node's blocks agree with `blocks[at:]`; the first one does."""
    low, high = 1, min(len(stretch), len(blocks) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if stretch[middle - 1] == blocks[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
