"""Prompts that workers hold because we sent them there: a radix tree of block hashes for all workers.

Theory of operation
-------------------
A node is a stretch of consecutive blocks that are held by the same requests, so a prompt is a path of a few
nodes however long it is. A chained hash names its whole prefix; hence the last hash of a stretch proves all
of it, and where a prompt leaves a stretch is found by halving. Reserving, giving back and matching cost a
step per node, not per block.

What is reserved begins with the first block of a prompt. A node is split where a prompt ends or leaves it,
and forgotten when nobody holds it. On each worker a node is held

* by requests on their way, as often as it was reserved;
* as **assumed**, once, if the worker is taken to have it in its cache (see `extproc.core.assumed_cache`).
  While no request uses it, it is in a `Use`: what was last used together, the end before the beginning.

Splitting keeps the order: both halves are in the same use, the deeper one first.
"""

from collections.abc import Iterator, Sequence

from extproc.core.kv_states import WIDTH

NEVER = float("-inf")
_NUMBER_BYTES = 36  # of a Python integer of 64 bits
_NODE_BYTES = 800


class Use:
    """Assumed nodes of one worker that were last used by the same request, the deepest first.

    Attributes:
        at: when that was, seconds.
        answer: blocks of its answer: nobody asks for them by name, but they take up room.
        nodes: those that no request uses now.
    """

    __slots__ = ("answer", "at", "nodes")

    def __init__(self, at: float, answer: int = 0) -> None:
        self.at = at
        self.answer = answer
        self.nodes: list[Node] = []


class Node:
    """A stretch of blocks; see above. `holders` has a worker's bit set (see `kv_states`) if it holds it."""

    __slots__ = ("blocks", "children", "counts", "holders", "parent", "uses")

    def __init__(self, blocks: tuple[int, ...], parent: "Node | None") -> None:
        self.blocks = blocks
        self.parent = parent
        self.children: dict[int, Node] = {}  # by their first block
        self.counts: dict[int, int] = {}  # slot -> requests on their way
        self.uses: dict[int, Use | None] = {}  # slot -> where it is assumed; None: in use by requests
        self.holders = 0


class Holdings:
    """What one worker holds in the tree, in blocks.

    Attributes:
        distinct: each block once.
        in_use: those that requests on their way use.
        assumed: those that are assumed to be in its cache, in use or not.
        waiting: of `assumed`, those that no request uses.
        reserved: blocks reserved by requests, each as often as it was.
        queue: uses of `waiting` blocks, the least recent first; answers are in it as well.
    """

    __slots__ = ("assumed", "distinct", "in_use", "queue", "reserved", "waiting")

    def __init__(self) -> None:
        self.distinct = 0
        self.in_use = 0
        self.assumed = 0
        self.waiting = 0
        self.reserved = 0
        self.queue: dict[Use, None] = {}


class Reservations:
    """The tree, and what each worker (by its slot in the index) holds in it."""

    def __init__(self) -> None:
        self._root = Node((), None)
        self._holdings: dict[int, Holdings] = {}
        self._nodes = 0
        self.blocks = 0
        """Different blocks in the tree."""

    def of(self, slot: int) -> Holdings:
        """What the worker in `slot` holds; kept up to date."""
        found = self._holdings.get(slot)
        if found is None:
            found = self._holdings[slot] = Holdings()
        return found

    @property
    def memory_bytes(self) -> int:
        """Estimated memory: 8 bytes a block and its number, and what a node takes."""
        return self.blocks * (8 + _NUMBER_BYTES) + self._nodes * _NODE_BYTES

    def reserve(self, slot: int, chain: Sequence[int]) -> None:
        """One more request at the worker uses the blocks of `chain`, from its first on."""
        holdings, bit = self.of(slot), 1 << WIDTH * slot
        holdings.reserved += len(chain)
        for node in self.path(chain):
            count = node.counts.get(slot, 0)
            node.counts[slot] = count + 1
            if not count:
                holdings.in_use += len(node.blocks)
                if slot in node.uses:
                    self._take(slot, node, holdings)
                else:
                    holdings.distinct += len(node.blocks)
                    node.holders |= bit

    def unreserve(self, slot: int, chain: Sequence[int], now: float = NEVER) -> bool:
        """Take back one `reserve` of the same chain; `now` is when its blocks were last used.

        Returns False, and changes nothing, if it is not reserved.
        """
        path = self._exact(chain)
        if path is None or not all(slot in node.counts for node in path):
            return False
        holdings, bit = self.of(slot), 1 << WIDTH * slot
        holdings.reserved -= len(chain)
        use = Use(now)
        for node in reversed(path):
            count = node.counts[slot] - 1
            if count:
                node.counts[slot] = count
                continue
            del node.counts[slot]
            holdings.in_use -= len(node.blocks)
            if slot in node.uses:
                self._put(slot, node, use, holdings)
            else:
                holdings.distinct -= len(node.blocks)
                node.holders ^= bit
                self._prune(node)
        if use.nodes:
            holdings.queue[use] = None
        return True

    def assume(self, slot: int, chain: Sequence[int], now: float, answer: int) -> None:
        """The worker has just served `chain`, and an answer of so many blocks more: it has them now."""
        holdings, bit = self.of(slot), 1 << WIDTH * slot
        use = Use(now, answer)
        holdings.queue[use] = None
        holdings.waiting += answer
        for node in reversed(self.path(chain)):
            size = len(node.blocks)
            if slot not in node.uses:
                node.uses[slot] = None
                holdings.assumed += size
                if slot not in node.counts:
                    holdings.distinct += size
                    node.holders |= bit
            if slot not in node.counts:
                self._take(slot, node, holdings)
                self._put(slot, node, use, holdings)

    def forget(self, slot: int, chain: Sequence[int], held: int, since: float) -> None:
        """The worker had only the first `held` blocks of `chain`: what is behind them is not assumed.

        It may have what was used there `since`.
        """
        beyond = self._first_beyond(chain, held)
        if beyond is None:
            return
        found = [beyond]
        for node in found:  # grows meanwhile
            found += node.children.values()
        for node in reversed(found):
            use = node.uses.get(slot)
            if use is not None and use.at < since:
                self._drop(slot, node)

    def evict(self, slot: int, blocks: int) -> None:
        """Forget so many blocks of those that no request uses, the least recently used first."""
        holdings = self.of(slot)
        while blocks > 0 and holdings.queue:
            use = next(iter(holdings.queue))
            if use.answer:
                gone = min(use.answer, blocks)
                use.answer -= gone
                holdings.waiting -= gone
                blocks -= gone
            elif use.nodes:
                node = use.nodes[0]
                surplus = len(node.blocks) - blocks
                if surplus > 0:  # its end goes before its beginning
                    self._split(node, surplus)
                blocks -= len(node.blocks)
                self._drop(slot, node)
            else:
                del holdings.queue[use]

    def shrink(self, blocks: int) -> int:
        """Forget so many different blocks, whoever is assumed to have them: the least recently used first.

        Those that requests use stay. Returns how many were forgotten.
        """
        before = self.blocks
        while before - self.blocks < blocks:
            waiting = ((next(iter(h.queue)).at, slot) for slot, h in self._holdings.items() if h.queue)
            slot = min(waiting, default=(NEVER, -1))[1]
            if slot < 0:
                break
            holdings = self.of(slot)
            use = next(iter(holdings.queue))
            if use.nodes:
                node = use.nodes[0]
                surplus = len(node.blocks) - (blocks - (before - self.blocks))
                if surplus > 0:  # its end goes before its beginning
                    self._split(node, surplus)
                self._drop(slot, node)
            else:
                holdings.waiting -= use.answer
                del holdings.queue[use]
        return before - self.blocks

    def expire(self, slot: int, before: float) -> None:
        """Forget what has not been used since."""
        holdings = self.of(slot)
        while holdings.queue:
            use = next(iter(holdings.queue))
            if use.at > before:
                return
            holdings.waiting -= use.answer
            for node in list(use.nodes):
                self._drop(slot, node)
            holdings.queue.pop(use, None)

    def drop_assumed(self, slot: int) -> None:
        """Nothing is assumed of the worker any more."""
        if self.of(slot).assumed:
            for node in self._deepest_first():
                if slot in node.uses:
                    self._drop(slot, node)
        holdings = self.of(slot)
        holdings.queue.clear()
        holdings.waiting = 0

    def clear(self, slot: int) -> None:
        """The worker is gone with all it holds."""
        if self.of(slot).distinct:
            bit = 1 << WIDTH * slot
            for node in self._deepest_first():
                if node.holders & bit:
                    node.counts.pop(slot, None)
                    node.uses.pop(slot, None)
                    node.holders ^= bit
                    self._prune(node)
        del self._holdings[slot]

    def prefixes(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """How many leading blocks of `chain` workers hold: (bits of workers, blocks), the fewest first."""
        found: list[tuple[int, int]] = []
        children, at, size = self._root.children, 0, len(chain)
        racing = -1
        while at < size:
            node = children.get(chain[at])
            if node is None:
                break
            left = racing & ~node.holders
            if left:
                if at:
                    found.append((left, at))
                racing &= node.holders
                if not racing:
                    return found
            stop = at + len(node.blocks)
            if stop > size or chain[stop - 1] != node.blocks[-1]:
                at += _shared(node.blocks, chain, at)
                break
            at, children = stop, node.children
        if at:
            found.append((racing, at))
        return found

    def path(self, chain: Sequence[int]) -> list[Node]:
        """The nodes of `chain`, made where there are none. Who makes some must hold them."""
        path: list[Node] = []
        node, at, size = self._root, 0, len(chain)
        while at < size:
            child = node.children.get(chain[at])
            if child is None:
                child = Node(tuple(chain[at:]), node)
                node.children[chain[at]] = child
                self.blocks += size - at
                self._nodes += 1
                path.append(child)
                break
            stop = at + len(child.blocks)
            if stop > size or chain[stop - 1] != child.blocks[-1]:
                shared = _shared(child.blocks, chain, at)
                stop = at + shared
                child = self._split(child, shared)
            path.append(child)
            node, at = child, stop
        return path

    def _exact(self, chain: Sequence[int]) -> list[Node] | None:
        """The nodes of `chain`, if it ends where a node ends."""
        path: list[Node] = []
        node, at, size = self._root, 0, len(chain)
        while at < size:
            child = node.children.get(chain[at])
            if child is None:
                return None
            at += len(child.blocks)
            if at > size or chain[at - 1] != child.blocks[-1]:
                return None
            path.append(child)
            node = child
        return path

    def _first_beyond(self, chain: Sequence[int], held: int) -> Node | None:
        """The node of the block of `chain` at `held`, which is its first block then."""
        node, at = self._root, 0
        while at < len(chain):
            child = node.children.get(chain[at])
            if child is None:
                return None
            stop = at + len(child.blocks)
            if stop > held:
                if held > at:
                    if _shared(child.blocks, chain, at) <= held - at:
                        return None
                    self._split(child, held - at)
                return child
            if stop > len(chain) or chain[stop - 1] != child.blocks[-1]:
                return None
            node, at = child, stop
        return None

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after its first `at` blocks; it goes on being the lower part. Returns the upper one."""
        parent = node.parent
        upper = Node(node.blocks[:at], parent)
        if parent is not None:
            parent.children[upper.blocks[0]] = upper
        node.blocks, node.parent = node.blocks[at:], upper
        upper.children[node.blocks[0]] = node
        upper.counts, upper.uses, upper.holders = node.counts.copy(), node.uses.copy(), node.holders
        for use in upper.uses.values():
            if use is not None:
                use.nodes.insert(use.nodes.index(node) + 1, upper)
        self._nodes += 1
        return upper

    def _take(self, slot: int, node: Node, holdings: Holdings) -> None:
        """Take an assumed node out of the use it is in."""
        use = node.uses[slot]
        if use is not None:
            use.nodes.remove(node)
            node.uses[slot] = None
            holdings.waiting -= len(node.blocks)
            if not use.nodes and not use.answer:
                holdings.queue.pop(use, None)

    def _put(self, slot: int, node: Node, use: Use, holdings: Holdings) -> None:
        use.nodes.append(node)
        node.uses[slot] = use
        holdings.waiting += len(node.blocks)

    def _drop(self, slot: int, node: Node) -> None:
        """A node is not assumed any more."""
        holdings = self.of(slot)
        self._take(slot, node, holdings)
        del node.uses[slot]
        holdings.assumed -= len(node.blocks)
        if slot not in node.counts:
            holdings.distinct -= len(node.blocks)
            node.holders ^= 1 << WIDTH * slot
            self._prune(node)

    def _prune(self, node: Node) -> None:
        if not node.holders and not node.children and node.parent is not None:
            del node.parent.children[node.blocks[0]]
            self.blocks -= len(node.blocks)
            self._nodes -= 1

    def _deepest_first(self) -> Iterator[Node]:
        found = [self._root]
        for node in found:  # grows meanwhile
            found += node.children.values()
        return reversed(found[1:])


def _shared(blocks: Sequence[int], chain: Sequence[int], at: int) -> int:
    """How many leading `blocks` `chain` has from `at` on; they are equal up to there, and no further."""
    low, high = 0, min(len(blocks), len(chain) - at)
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] == chain[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low
