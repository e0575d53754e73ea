"""Preble's radix tree of prompts, with what each worker is believed to hold of them. See `preble`.

Letters are the engine's blocks; the tokens of a prompt beyond the blocks that an engine can hit are one more
letter of its own.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from extproc.sim.routing import SimRequest

Letter = tuple[int, int]
"""A block, or the rest of a prompt: its hash and how many tokens it has."""


class TreeNode:
    """A stretch of prompts.

    Attributes:
        tokens: its length.
        tokens_before: of its ancestors together.
        depth: nodes above it, as Preble counts them.
        allocated: workers that its prompts are sent to.
        under_way: requests through it, by worker.
        cached: workers that are believed to hold it.
        used_at: when a prompt last came by.
    """

    __slots__ = (
        "allocated",
        "cached",
        "children",
        "depth",
        "letters",
        "parent",
        "tokens",
        "tokens_before",
        "under_way",
        "used_at",
    )

    def __init__(
        self, letters: Sequence[Letter], parent: "TreeNode | None", replicas: int, depth: int, now: float
    ) -> None:
        self.letters = letters
        self.parent = parent
        self.children: dict[int, TreeNode] = {}
        self.tokens = sum(tokens for _, tokens in letters)
        self.tokens_before: int = parent.tokens_before + parent.tokens if parent else 0
        self.depth = depth
        self.allocated: set[int] = set()
        self.under_way = [0] * replicas
        self.cached: set[int] = set()
        self.used_at = now

    @property
    def is_large(self) -> bool:
        """Whether it holds more tokens than its ancestors together."""
        return self.tokens > self.tokens_before

    def path(self) -> Iterator["TreeNode"]:
        """It and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def important(self) -> "TreeNode":
        """The deepest large node of its path; the first one below the root always is."""
        return next(node for node in self.path() if node.is_large)

    def nearest_allocation(self) -> set[int]:
        """Workers of the first node on its path that has any."""
        return next((node.allocated for node in self.path() if node.allocated), set())

    def subtree(self) -> Iterator["TreeNode"]:
        """It and everything below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class PrebleTree:
    """All prompts ever sent."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._root = TreeNode((), None, replicas, 0, 0.0)
        self._nodes: list[TreeNode] = []
        self._held = [0] * replicas
        self._rests = 0

    def insert(self, request: SimRequest, now: float) -> tuple[TreeNode, list[tuple[TreeNode, TreeNode]]]:
        """The leaf of this prompt, and the nodes that were cut for it as (lower half, upper half)."""
        self._rests -= 1
        size = request.block_size
        letters: list[Letter] = [(block, size) for block in request.prefix]
        letters.append((self._rests, request.prompt_tokens - len(request.prefix) * size))
        node, at, depth = self._root, 0, 0
        splits: list[tuple[TreeNode, TreeNode]] = []
        while True:
            node.used_at = now
            child = node.children.get(letters[at][0])
            if child is None:
                leaf = TreeNode(letters[at:], node, self._replicas, depth + 1, now)
                node.children[letters[at][0]] = leaf
                self._nodes.append(leaf)
                return leaf, splits
            common = 1
            while common < len(child.letters) and child.letters[common] == letters[at + common]:
                common += 1
            if common < len(child.letters):
                upper = self._split(child, common, depth + 1, now)
                splits.append((child, upper))
                child = upper
                depth += 1
            node, at, depth = child, at + common, depth + 1

    def _split(self, node: TreeNode, at: int, depth: int, now: float) -> TreeNode:
        upper = TreeNode(node.letters[:at], node.parent, self._replicas, depth, now)
        upper.children[node.letters[at][0]] = node
        upper.allocated = node.allocated.copy()
        upper.under_way = node.under_way.copy()
        upper.cached = node.cached.copy()
        if node.parent is not None:
            node.parent.children[node.letters[0][0]] = upper
        node.letters = node.letters[at:]
        node.tokens -= upper.tokens
        node.tokens_before += upper.tokens
        node.parent = upper
        node.depth = depth + 1
        self._nodes.append(upper)
        return upper

    def send(self, leaf: TreeNode, worker: int) -> None:
        """The prompt that ends at `leaf` goes to `worker`."""
        for node in leaf.path():
            node.under_way[worker] += 1
            if worker not in node.cached:
                node.cached.add(worker)
                self._held[worker] += node.tokens

    def finish(self, leaf: TreeNode, worker: int) -> None:
        """A request that ended at `leaf` is over."""
        for node in leaf.path():
            node.under_way[worker] -= 1

    def evict(self, worker: int, capacity: int) -> None:
        """Forget what `worker` can no longer hold of what nobody uses there, least recently used first."""
        excess = self._held[worker] - capacity
        if excess <= 0:
            return
        for node in self._victims(worker, excess, unused=True):
            node.cached.discard(worker)
            self._held[worker] -= node.tokens

    def would_evict(self, worker: int, tokens: int) -> list[TreeNode]:
        """The nodes that would go for so many new tokens, those of the fewest requests under way first."""
        return list(self._victims(worker, tokens, unused=False))

    def _victims(self, worker: int, tokens: int, *, unused: bool) -> Iterator[TreeNode]:
        heap = [
            (node.under_way, node.used_at, order, node)
            for order, node in enumerate(self._nodes)
            if worker in node.cached and not (unused and node.under_way[worker])
        ]
        heapify(heap)
        gone: set[TreeNode] = set()
        while tokens > 0 and heap:
            *_, order, node = heappop(heap)
            if node in gone:
                continue
            gone.add(node)
            tokens -= node.tokens
            yield node
            parent = node.parent
            if parent is None or parent is self._root:
                continue
            siblings = (child for child in parent.children.values() if worker in child.cached)
            if all(child in gone for child in siblings) and not (unused and parent.under_way[worker]):
                heappush(heap, (parent.under_way, parent.used_at, order, parent))
