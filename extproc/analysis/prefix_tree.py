"""A compressed prefix tree over token sequences, bounded in memory.

A node is an edge: a run of tokens that every prompt below it shares. A prompt's path is the list of nodes
whose runs, joined, are exactly the prompt. Where prompts part inside a run, the node is split.

Memory is bounded by `capacity` bytes: 4 per token held and `NODE_BYTES` per node. Above it the leaf whose
last use lies furthest back is forgotten (the tail first, as an engine's cache does it), so what was shared
with it is no longer seen: shared lengths become lower bounds, and `forgotten` says how many tokens that was.
"""

import heapq
from collections.abc import Callable

TOKEN_BYTES = 4
NODE_BYTES = 480
"""What a node costs besides its tokens: the object, its place in the parent, its place in the heap, marks."""


class Node:
    """A run of tokens. `start` is the position of its first token; `last` the number of its last request.

    `count` is how many prompts went through it, `ends` how many of them ended exactly at its end. `last_time`
    is when it was last used (seconds, the log's clock; None: the log did not say). `marks` is for the owner.
    """

    __slots__ = ("children", "count", "ends", "last", "last_time", "marks", "parent", "run", "start")

    def __init__(self, run: bytes, start: int, parent: "Node | None") -> None:
        self.run = run
        self.start = start
        self.parent = parent
        self.children: dict[bytes, Node] | None = None
        self.count = 0
        self.ends = 0
        self.last = 0
        self.last_time: float | None = None
        self.marks = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.run) // TOKEN_BYTES


def common_bytes(one: bytes, other: bytes) -> int:
    """Length of the common beginning, in bytes."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    low, step = 0, 256  # differences are mostly near the beginning
    while one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(low + step, length)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixTree:
    """See the module.

    Args:
        capacity: bytes to hold at most.
        on_split: told (new upper node, lower node) whenever a node is split; the lower keeps its identity.
    """

    def __init__(self, capacity: int, on_split: Callable[[Node, Node], None] | None = None) -> None:
        self._capacity = capacity
        self._on_split = on_split
        self.roots: dict[str, Node] = {}
        self._names: dict[Node, str] = {}  # of the roots
        self._heap: list[tuple[int, int, int, Node]] = []  # leaves by last use; entries may be out of date
        self._pushed = 0
        self.requests = 0
        self.held_bytes = 0
        self.nodes = 0
        self.forgotten = 0

    def add(self, namespace: str, tokens: bytes) -> tuple[int, list[Node]]:
        """Add a prompt: the bytes of its 4-byte tokens. Prompts of different namespaces share nothing.

        Returns:
            How many of its first tokens an earlier prompt of the namespace began with, and its path: a last
            node with `count` 1 may be new. Times of nodes are noted by `touch`, not here.
        """
        self.requests += 1
        at, path = self._descend(namespace, tokens)
        shared = at // TOKEN_BYTES
        if at < len(tokens):
            parent = path[-1] if path else self._root(namespace)
            leaf = self._new_node(tokens[at:], shared, parent)
            children = parent.children
            if children is None:
                children = parent.children = {}
            children[tokens[at : at + TOKEN_BYTES]] = leaf
            self._push(leaf)
            path.append(leaf)
        number = self.requests
        for node in path:
            node.count += 1
            node.last = number
        if path:
            path[-1].ends += 1
        if self.held_bytes > self._capacity:
            self._forget()
        return shared, path

    @staticmethod
    def touch(path: list[Node], time: float | None) -> None:
        """Note when the nodes of a path were used."""
        for node in path:
            node.last_time = time

    @staticmethod
    def tokens_of(node: Node) -> bytes | None:
        """Every token from the beginning to the node's end; None if it has been forgotten."""
        runs: list[bytes] = []
        at: Node | None = node
        while at is not None:
            if at.start < 0:
                return None
            runs.append(at.run)
            at = at.parent
        return b"".join(reversed(runs))

    # --- inside -----------------------------------------------------------------------------------

    def _root(self, namespace: str) -> Node:
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(b"", 0, None)
            self._names[root] = namespace
            self.held_bytes += NODE_BYTES
            self.nodes += 1
        return root

    def _new_node(self, run: bytes, start: int, parent: Node) -> Node:
        self.nodes += 1
        self.held_bytes += NODE_BYTES + len(run)
        return Node(run, start, parent)

    def _descend(self, namespace: str, tokens: bytes) -> tuple[int, list[Node]]:
        """Follow the tokens; split where they leave a run. Returns bytes matched and the path."""
        node = self._root(namespace)
        path: list[Node] = []
        at, total = 0, len(tokens)
        while at < total and node.children:
            child = node.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                break
            run = child.run
            if tokens[at : at + len(run)] == run:
                at += len(run)
                path.append(child)
                node = child
                continue
            same = common_bytes(run, tokens[at : at + len(run)]) // TOKEN_BYTES * TOKEN_BYTES
            path.append(self._split(child, same))
            at += same
            break
        return at, path

    def _split(self, node: Node, at: int) -> Node:
        """Put a new node above for the first `at` bytes of the run."""
        parent = node.parent
        assert parent is not None and parent.children is not None  # noqa: S101, PT018 - a root has no run
        upper = self._new_node(node.run[:at], node.start, parent)
        self.held_bytes -= at
        upper.count, upper.last, upper.last_time, upper.marks = (
            node.count,
            node.last,
            node.last_time,
            node.marks,
        )
        parent.children[upper.run[:TOKEN_BYTES]] = upper
        node.run = node.run[at:]
        node.start += at // TOKEN_BYTES
        node.parent = upper
        upper.children = {node.run[:TOKEN_BYTES]: node}
        if self._on_split is not None:
            self._on_split(upper, node)
        return upper

    def _push(self, leaf: Node) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (leaf.last or self.requests, -leaf.start, self._pushed, leaf))

    def _forget(self) -> None:
        """Forget the least recently used leaves until a little room is left."""
        target = self._capacity - self._capacity // 64
        heap = self._heap
        while self.held_bytes > target and heap:
            last, _, _, leaf = heapq.heappop(heap)
            parent = leaf.parent
            if leaf.children or parent is None:
                continue
            if leaf.last != last:
                self._push(leaf)
                continue
            if leaf.last == self.requests:  # the prompt just added: larger than everything there may be
                self._push(leaf)
                break
            self._drop(leaf, parent)

    def _drop(self, leaf: Node, parent: Node) -> None:
        self.held_bytes -= NODE_BYTES + len(leaf.run)
        self.nodes -= 1
        self.forgotten += len(leaf.run) // TOKEN_BYTES
        assert parent.children is not None  # noqa: S101 - it has this one
        del parent.children[leaf.run[:TOKEN_BYTES]]
        leaf.run, leaf.parent, leaf.start = b"", None, -1  # whoever still knows it holds no tokens through it
        if parent.children:
            return
        parent.children = None
        if parent.parent is not None:
            self._push(parent)
            return
        del self.roots[self._names.pop(parent)]
        self.nodes -= 1
        self.held_bytes -= NODE_BYTES
