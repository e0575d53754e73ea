"""`preble`: Preble's global scheduler (E2: exploitation and exploration).

A radix tree holds every prompt sent; a node knows the workers it is allocated to and the requests under way
below it. With `new` the tokens of a prompt that nobody sent before (its leaf) and `old` those before:

    if new < old:  the workers of the leaf, or of its nearest ancestor that has any; the cheapest if several
    else:          the cheapest of all workers

    cost(worker) = sum over the important nodes of the last 3 minutes that are allocated to it:
                       miss rate * requests * prefill time / workers of the node
                       + requests under way there * output tokens * TPOT of the worker
                 + the same prefill cost of the large nodes that an LRU would evict there for `new` tokens

A node is large if it holds more tokens than its ancestors together; the important node of a prompt is its
deepest large one. Output tokens are the limit the client sent, 45 without one. TPOT is the median of the last
200 requests of the worker, at first 0.15 s. After a request, if the most costly worker costs 1.5 times the
least costly, important nodes move from one to the other, cheapest first, until it no longer does; a single
one is shared instead, when the TTFT of its requests doubled within the window.

Source: github.com/WukLab/preble at 8e7906a, `preble/global_scheduler_with_time.py`, `global_lru_cache.py`,
`ttft_overload_detector.py`; eviction cost on, as its server has it. Srivatsa et al., ICLR 2025.

Differs. Its prefill time is a fit for Mistral 7B on an A6000; here it is the simulated engine's own time
model. A worker's size is the simulated engine's. Nodes part at whole blocks; a prompt's last tokens, beyond
the blocks an engine can hit, are its own.
"""

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop
from statistics import median

from extproc.sim.routing import FleetFacts, NullRouter, SimRequest
from loadtests.peers.preble_tree import PrebleTree, TreeNode

WINDOW_S = 180.0
HIGH_LOAD = 1.5
MIN_REQUESTS_PER_WORKER = 50
MAX_CHAIN = 3
DEFAULT_OUTPUT_TOKENS = 45
FIRST_TPOT_S = 0.15


class _Sent:
    """A request under way."""

    __slots__ = ("at", "first_at", "leaf", "worker")

    def __init__(self, leaf: TreeNode, worker: int, at: float) -> None:
        self.leaf = leaf
        self.worker = worker
        self.at = at
        self.first_at: float | None = None


class Preble(NullRouter):
    """See the module's docstring."""

    name = "preble"
    wants_kv_events = False

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        del seed  # nothing in it is left to chance
        self._replicas = facts.replicas
        self._time = facts.engine.time
        self._capacity = (facts.engine.num_gpu_blocks - 1) * facts.engine.block_size
        self.tree = PrebleTree(facts.replicas)
        self._important: dict[TreeNode, _Window] = {}
        self._window: deque[tuple[float, TreeNode, int, int]] = deque()  # at, node, prompt, new tokens
        self._tpot = [deque([FIRST_TPOT_S], maxlen=200) for _ in range(facts.replicas)]
        self._under_way: dict[str, _Sent] = {}
        self._routed = 0

    # --- routing -----------------------------------------------------------------------------------------

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        leaf, splits = self.tree.insert(request, now)
        for lower, upper in splits:
            self._inherit(lower, upper)
        important = leaf.important()
        everyone = range(self._replicas)
        if leaf.tokens < leaf.tokens_before:
            worker = self._cheapest(leaf, sorted(leaf.nearest_allocation() or everyone))
        else:
            worker = self._cheapest(leaf, list(everyone))
        for node in leaf.path():
            node.allocated.add(worker)
        self.tree.send(leaf, worker)
        self._record(request, important, leaf, now)
        self._routed += 1
        self.tree.evict(worker, self._capacity)
        if leaf.depth - important.depth < MAX_CHAIN:
            self._rebalance(now)
        self._under_way[request.request_id] = _Sent(leaf, worker, now)
        return worker

    def _cheapest(self, leaf: TreeNode, workers: list[int]) -> int:
        if len(workers) == 1:
            return workers[0]
        costs = self._costs(1)
        return min(workers, key=lambda worker: costs[worker] + self._eviction_cost(leaf, worker))

    def _costs(self, min_requests: int) -> list[float]:
        """Cost of each worker, in seconds, counting nodes with at least so many requests in the window."""
        costs = [0.0] * self._replicas
        tpot = [median(observed) for observed in self._tpot]
        for node, window in self._important.items():
            if window.requests < min_requests:
                continue
            for worker in node.allocated:
                costs[worker] += self._node_cost(node, worker, tpot[worker])
        return costs

    def _node_cost(self, node: TreeNode, worker: int, tpot_s: float) -> float:
        window = self._important[node]
        prefill = window.miss_rate * window.requests * self._prefill_s(node) / len(node.allocated)
        return prefill + node.under_way[worker] * window.output_tokens * tpot_s

    def _eviction_cost(self, leaf: TreeNode, worker: int) -> float:
        cost = 0.0
        for node in self.tree.would_evict(worker, leaf.tokens):
            if node.is_large:
                window = self._important.get(node)
                rate = 1.0 if window is None else window.miss_rate
                requests = node.under_way[worker] if window is None else window.requests
                cost += rate * requests * self._prefill_s(node)
        return cost

    def _prefill_s(self, node: TreeNode) -> float:
        pairs = node.tokens * node.tokens_before + node.tokens * (node.tokens - 1) / 2
        return self._time.step_s(node.tokens, pairs, 0, 0)

    # --- the window --------------------------------------------------------------------------------------

    def _record(self, request: SimRequest, important: TreeNode, leaf: TreeNode, now: float) -> None:
        window = self._important.setdefault(important, _Window())
        prompt = leaf.tokens_before + leaf.tokens
        window.output_tokens = request.max_output_tokens or DEFAULT_OUTPUT_TOKENS
        window.add(prompt, leaf.tokens)
        self._window.append((now, important, prompt, leaf.tokens))
        while self._window and self._window[0][0] < now - WINDOW_S:
            _, node, prompt, new = self._window.popleft()
            old = self._important.get(node)
            if old is None:
                continue
            old.add(-prompt, -new)
            if old.requests <= 0:
                del self._important[node]
                node.allocated = set()

    def _inherit(self, lower: TreeNode, upper: TreeNode) -> None:
        """`upper` was cut from the top of `lower`."""
        if upper.is_large and not lower.is_large and lower in self._important:
            self._important[upper] = self._important.pop(lower)
            renamed = ((a, upper if n is lower else n, p, new) for a, n, p, new in self._window)
            self._window = deque(renamed)

    # --- rebalancing -------------------------------------------------------------------------------------

    def _rebalance(self, now: float) -> None:
        if self._routed < MIN_REQUESTS_PER_WORKER * self._replicas:
            return
        costs = self._costs(2)
        ranked = sorted(range(self._replicas), key=lambda worker: -costs[worker])
        for large in ranked[:-1]:
            small = ranked[-1]
            if costs[large] < HIGH_LOAD * costs[small]:
                return
            self._shift(large, small, costs, now)

    def _shift(self, large: int, small: int, costs: list[float], now: float) -> None:
        tpot = median(self._tpot[large])
        movable = [
            (self._node_cost(node, large, tpot), order, node)
            for order, (node, window) in enumerate(self._important.items())
            if large in node.allocated and node.is_large and window.requests > 1
        ]
        if len(movable) == 1:
            cost, _, node = movable[0]
            if small not in node.allocated and self._important[node].slowed_down(large, now):
                costs[large] -= cost / 2
                costs[small] += cost / 2
                node.allocated.add(small)
                self._important[node].ttft.pop(large)
            return
        for cost, node in _cheapest_first(movable):
            if costs[large] - cost < costs[small] + cost:
                return
            costs[large] -= cost
            costs[small] += cost
            for below in node.subtree():
                below.allocated = {small}
            if costs[large] < HIGH_LOAD * costs[small]:
                return

    # --- signals -----------------------------------------------------------------------------------------

    def on_first_token(self, request_id: str, now: float) -> None:
        """See `FleetRouter`."""
        self._under_way[request_id].first_at = now

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        del cached_tokens
        sent = self._under_way.pop(request_id)
        self.tree.finish(sent.leaf, sent.worker)
        if sent.first_at is None or output_tokens is None:
            return
        window = self._important.get(sent.leaf.important())
        if window is not None:
            window.observe(sent.worker, sent.first_at - sent.at, now)
        if output_tokens > 1:
            self._tpot[sent.worker].append((now - sent.first_at) / (output_tokens - 1))


class _Window:
    """What came to an important node in the last 3 minutes."""

    __slots__ = ("new_tokens", "output_tokens", "prompt_tokens", "requests", "ttft")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.new_tokens = 0
        self.output_tokens = DEFAULT_OUTPUT_TOKENS
        self.ttft: dict[int, deque[tuple[float, float]]] = {}  # worker -> (at, seconds)

    def add(self, prompt_tokens: int, new_tokens: int) -> None:
        """One request more, or one less if negative."""
        self.requests += 1 if prompt_tokens > 0 else -1
        self.prompt_tokens += prompt_tokens
        self.new_tokens += new_tokens

    @property
    def miss_rate(self) -> float:
        """Share of the prompts' tokens that were new."""
        return self.new_tokens / self.prompt_tokens if self.prompt_tokens else 1.0

    def observe(self, worker: int, ttft_s: float, now: float) -> None:
        """A request's time to first token on `worker`."""
        observed = self.ttft.setdefault(worker, deque())
        observed.append((now, ttft_s))
        while observed[0][0] < now - WINDOW_S:
            observed.popleft()

    def slowed_down(self, worker: int, now: float) -> bool:
        """Whether TTFT in the newer half of the window is at least twice that in the older."""
        halves: tuple[list[float], list[float]] = ([], [])
        for at, ttft_s in self.ttft.get(worker, ()):
            halves[at >= now - WINDOW_S / 2].append(ttft_s)
        older, newer = halves
        if not older or not newer:
            return False
        return sum(newer) / len(newer) >= 2 * sum(older) / len(older)


def _cheapest_first(movable: list[tuple[float, int, TreeNode]]) -> Iterator[tuple[float, TreeNode]]:
    heapify(movable)
    while movable:
        cost, _, node = heappop(movable)
        yield cost, node
