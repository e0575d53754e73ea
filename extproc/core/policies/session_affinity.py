"""`session-affinity`: consistent hashing with virtual nodes and bounded load."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from random import Random

import xxhash

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

    def order(
        self, request: RoutingRequest, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[list[Candidate], Reason]:
        """See the class."""
        del rng
        by_worker = {candidate.worker: candidate for candidate in candidates}
        ring = [by_worker[worker] for worker in ring_order(session_hash(request), by_worker)]
        total = sum(candidate.active for candidate in candidates)
        bound = math.ceil(LOAD_BOUND * (total + 1) / len(ring))
        within = [candidate for candidate in ring if candidate.active < bound]
        beyond = [candidate for candidate in ring if candidate.active >= bound]
        moved = bool(within) and within[0] is not ring[0]
        return [*within, *beyond], Reason.SESSION_MOVED if moved else Reason.SESSION

    def inputs(self, request: RoutingRequest) -> PolicyInputs:
        """`session`: where on the ring the request's session lies, in hexadecimal."""
        return (("session", f"{session_hash(request):016x}"),)


def ring_order(key: int, workers: Iterable[WorkerId]) -> list[WorkerId]:
    """Workers in the order in which the ring reaches them from `key`.

    A worker is reached at its first point at or after `key`. So no ring is built, which takes long, and would
    have to be for each pool, each subset, and whenever a worker is ready or is not.
    """

    def distance(worker: WorkerId) -> tuple[int, WorkerId]:
        points = _points(worker)
        at = bisect_left(points, key)
        return (points[at] if at < VIRTUAL_NODES else points[0] + (1 << 64)) - key, worker

    return sorted(workers, key=distance)


@lru_cache(maxsize=4096)
def _points(worker: WorkerId) -> "array[int]":
    """What a worker owns on the ring, in order."""
    found = (xxhash.xxh3_64_intdigest(f"{worker}/{number}".encode()) for number in range(VIRTUAL_NODES))
    return array("Q", sorted(found))


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
