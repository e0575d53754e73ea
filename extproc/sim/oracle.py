"""`oracle`: the least true cost, with what no router can know.

It reads the engines themselves: which blocks are cached now, which prompts wait, how much of each was left to
compute when it was sent there, how much every sequence is still going to generate, and the time model. A
request goes to the worker where the sum of these is least, in seconds:

    wait     the step in flight, and the prefill of everything that waits there
    prefill  its own uncovered tokens, counting what prompts before it in the queue are about to cache
    decode   its own steps beside the sequences that will still be running then
    harm     what its prefill delays the sequences running there and one that may come next, and what its
             decoding slows them
    memory   recomputing, at prefill speed, the tokens that do not fit

Greedy: it does not know which requests are going to come, so it is a bound for routers that decide one
request at a time, and no proof of optimality for whole runs. Blocks that it evicts cost it nothing until they
miss.
"""

from bisect import bisect_left
from collections.abc import Sequence
from random import Random

from extproc.sim.engine_types import Outlook
from extproc.sim.fleet_engine import FleetEngine
from extproc.sim.routing import FleetFacts, NullRouter, SimRequest

_TIE_S = 1e-9


class Oracle(NullRouter):
    """See the module's docstring. Ties go to the worker with the fewest sequences, then to chance."""

    name = "oracle"
    wants_kv_events = False

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        self._config = facts.engine
        self._time = facts.engine.time
        self._rng = Random(seed)  # noqa: S311 - a simulation
        self._engines: Sequence[FleetEngine] = ()
        # Routed, and on the wire to the engine: by worker, in order.
        self._flying: list[dict[str, SimRequest]] = [{} for _ in range(facts.replicas)]
        self._network_s = 0.0
        self._sent: dict[str, float] = {}
        self._todo: dict[str, int] = {}  # prompt tokens left to compute, as of when it was routed

    def attach(self, engines: Sequence[FleetEngine], network_s: float) -> None:
        """See `SeesEngines`."""
        self._engines = engines
        self._network_s = network_s

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        best: list[tuple[int, int, int]] = []
        least = float("inf")
        for worker, engine in enumerate(self._engines):
            self._land(worker, now)
            engine.settle(now)
            outlook = engine.outlook()
            cost, todo = self._cost(request, engine, outlook, self._flying[worker], now)
            load = len(outlook) + len(self._flying[worker])
            if cost < least - _TIE_S:
                best, least = [(load, worker, todo)], cost
            elif cost <= least + _TIE_S:
                best.append((load, worker, todo))
        fewest = min(load for load, _, _ in best)
        worker, todo = self._rng.choice([(worker, todo) for load, worker, todo in best if load == fewest])
        self._todo[request.request_id] = todo
        self._flying[worker][request.request_id] = request
        self._sent[request.request_id] = now
        return worker

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        del cached_tokens, output_tokens, now
        del self._todo[request_id]

    def _land(self, worker: int, now: float) -> None:
        """Forget requests the engine has by now."""
        flying = self._flying[worker]
        for request_id in [r for r in flying if now >= self._sent[r] + self._network_s]:
            del flying[request_id], self._sent[request_id]

    def _cost(
        self,
        request: SimRequest,
        engine: FleetEngine,
        outlook: Sequence[Outlook],
        flying: dict[str, SimRequest],
        now: float,
    ) -> tuple[float, int]:
        """Seconds, and prompt tokens to be computed."""
        time, size = self._time, self._config.block_size
        output = request.truth.output_tokens
        hit = len(engine.pool.match(request.prefix, len(request.prefix)))
        ahead = pairs = 0.0  # prefill work in front, and its attention pairs
        decoding: list[tuple[int, int]] = []  # remaining output and context of the others
        held = 0
        waiting: list[tuple[Sequence[int], int, int, int]] = []  # blocks, prompt, its uncomputed part, output
        for other in outlook:
            if other.admitted and other.uncomputed <= 1:
                decoding.append((other.remaining, other.computed))
                held += other.computed
                continue
            prompt = other.computed + other.uncomputed
            todo = other.uncomputed if other.admitted else self._todo[other.request.request_id]
            waiting.append((other.request.block_hashes, prompt, todo, other.remaining))
        waiting += [
            (r.truth.blocks, r.prompt_tokens, self._todo[r.request_id], r.truth.output_tokens)
            for r in flying.values()
        ]
        for blocks, prompt, todo, remaining in waiting:
            ahead += todo
            pairs += todo * (prompt - todo) + todo * (todo - 1) / 2
            hit = max(hit, _shared(request.prefix, blocks, prompt // size))
            decoding.append((remaining, prompt))
            held += prompt
        todo = request.prompt_tokens - hit * size
        own_pairs = todo * hit * size + todo * (todo - 1) / 2
        # Steps in which prompts are computed also decode what is running.
        budget = max(1, self._config.max_num_batched_tokens - len(decoding))
        steps = -(-int(ahead + todo) // budget)
        context = sum(c for _, c in decoding)
        decode_ms = len(decoding) * time.decode_ms_per_sequence + context * time.context_ms_per_token
        work_ms = (ahead + todo) * time.prefill_ms_per_token + (
            pairs + own_pairs
        ) * time.attention_ms_per_pair
        first_ms = steps * (time.base_ms + decode_ms) + work_ms
        mine = request.prompt_tokens + output / 2
        per_step = time.decode_ms_per_sequence + mine * time.context_ms_per_token
        beside = sum(min(output, left) for left, _ in decoding)
        others_ms = sum(
            min(output, left) * (time.decode_ms_per_sequence + c * time.context_ms_per_token)
            for left, c in decoding
        )
        decode_own_ms = output * (time.base_ms + per_step) + others_ms
        own_ms = todo * time.prefill_ms_per_token + own_pairs * time.attention_ms_per_pair
        harm_ms = own_ms * (len(decoding) + 1) + beside * per_step
        capacity = (self._config.num_gpu_blocks - 1) * size
        excess = max(0.0, held + request.prompt_tokens + output - capacity)
        total_ms = first_ms + decode_own_ms + harm_ms + excess * time.prefill_ms_per_token
        return engine.step_left_s(now) + total_ms / 1000.0, todo


def _shared(blocks: Sequence[int], others: Sequence[int], limit: int) -> int:
    """Length of the common prefix of two chains, at most `limit`: equal at one place is equal before it."""
    limit = min(limit, len(blocks), len(others))
    if limit <= 0 or blocks[0] != others[0]:
        return 0
    return bisect_left(range(limit), True, key=lambda at: blocks[at] != others[at])  # noqa: FBT003 - the key's
