"""`session-affinity`: consistent hashing with virtual nodes and bounded load."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from random import Random

import xxhash

from extproc.core.cost import CostSettings
from extproc.core.policies.base import Policy
from extproc.core.types import Candidate, PolicyInputs, Reason, RoutingRequest, WorkerId

VIRTUAL_NODES = 160
LOAD_BOUND = 1.25
_DERIVED_TOKENS = 256


class SessionAffinity(Policy):
    """All requests of a session go to one worker; when workers come or go, few sessions move.

    Formula: each worker owns 160 points on a ring of 64-bit hashes; a request belongs to the first worker at
    or after the hash of its session key, and prefers the others in the order in which the ring goes on. A
    worker that already has `ceil(1.25 * (active + 1) / workers)` of our active requests is passed over
    (consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam, 2016).
    Inputs: the session key (a header, `prompt_cache_key` or `user`; else derived from the first 256 tokens,
    or the request id when there are none), active requests. Defaults: 160 points, bound 1.25.
    """

    name = "session-affinity"

    def __init__(self, settings: CostSettings) -> None:
        super().__init__(settings)
        self._members: tuple[WorkerId, ...] = ()
        self._points: list[int] = []
        self._owners: list[WorkerId] = []

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See the class."""
        del rng
        by_worker = {candidate.worker: candidate for candidate in candidates}
        ring = [by_worker[worker] for worker in self._walk(session_hash(request), tuple(sorted(by_worker)))]
        total = sum(candidate.active for candidate in candidates)
        bound = math.ceil(LOAD_BOUND * (total + 1) / len(ring))
        within = [candidate for candidate in ring if candidate.active < bound]
        beyond = [candidate for candidate in ring if candidate.active >= bound]
        moved = bool(within) and within[0] is not ring[0]
        return [*within, *beyond], Reason.SESSION_MOVED if moved else Reason.SESSION

    def inputs(self, request: RoutingRequest) -> PolicyInputs:
        """`session`: where on the ring the request's session lies, in hexadecimal."""
        return (("session", f"{session_hash(request):016x}"),)

    def _walk(self, key: int, workers: tuple[WorkerId, ...]) -> list[WorkerId]:
        """Workers in the order in which the ring reaches them from `key`."""
        if workers != self._members:
            points = sorted(
                (xxhash.xxh3_64_intdigest(f"{worker}/{number}".encode()), worker)
                for worker in workers
                for number in range(VIRTUAL_NODES)
            )
            self._members = workers
            self._points = [point for point, _ in points]
            self._owners = [owner for _, owner in points]
        start = bisect_left(self._points, key)
        seen: dict[WorkerId, None] = {}
        for at in range(len(self._owners)):
            seen.setdefault(self._owners[(start + at) % len(self._owners)])
            if len(seen) == len(workers):
                break
        return list(seen)


def session_hash(request: RoutingRequest) -> int:
    """Where a request's session lies on the ring: 64 bits."""
    if request.session_hash is not None:
        return request.session_hash
    if request.session_key is not None:
        return xxhash.xxh3_64_intdigest(request.session_key.encode("utf-8", "surrogatepass"))
    seed = request.namespace.seed
    if request.prompts:
        return xxhash.xxh3_64_intdigest(request.prompts[0][:_DERIVED_TOKENS].tobytes(), seed)
    if request.chains:
        chain = next(iter(request.chains.values()))[0]
        if chain:
            return chain[0]
    return xxhash.xxh3_64_intdigest(request.request_id.encode("utf-8", "surrogatepass"), seed)
