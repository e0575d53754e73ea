"""`ray-consistent-hash`: Ray Serve's consistent hashing on the session.

    ring:  100 virtual nodes a worker, at the low 64 bits of MurmurHash3 (x64, 128 bits, seed 0xF9B4CA77)
           of "<worker id>:<index>"
    route: the owner of the first virtual node after the hash of the session id

Load plays no part; the two fallback replicas are tried only when a replica refuses a request, and engines
here never refuse one for load.

Source: Ray 2.60, `python/ray/serve/experimental/consistent_hash_router.py`. A request without a session is
hashed by its own id there; in the simulator every request has a session.
"""

from bisect import bisect_right

from extproc.sim.routing import FleetFacts, NullRouter, SimRequest

SEED = 0xF9B4CA77
VIRTUAL_NODES = 100
_MASK = 0xFFFFFFFFFFFFFFFF
_C1 = 0x87C37B91114253D5
_C2 = 0x4CF5AD432745937F


class RayConsistentHash(NullRouter):
    """See the module's docstring."""

    name = "ray-consistent-hash"
    wants_kv_events = False

    def __init__(self, facts: FleetFacts, seed: int) -> None:
        del seed  # the hash's own seed is fixed
        ring = sorted(
            (murmur3(f"worker-{worker}:{node}".encode()), worker)
            for worker in range(facts.replicas)
            for node in range(VIRTUAL_NODES)
        )
        self._hashes = [point for point, _ in ring]
        self._workers = [worker for _, worker in ring]

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        del now
        at = bisect_right(self._hashes, murmur3(request.session_id.encode()))
        return self._workers[at % len(self._workers)]


def murmur3(data: bytes, seed: int = SEED) -> int:
    """The low 64 bits of MurmurHash3's 128-bit variant for 64-bit machines."""
    first = second = seed
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        one = int.from_bytes(data[at : at + 8], "little")
        two = int.from_bytes(data[at + 8 : at + 16], "little")
        first ^= _scramble(one, _C1, 31, _C2)
        first = ((_rotated(first, 27) + second) * 5 + 0x52DCE729) & _MASK
        second ^= _scramble(two, _C2, 33, _C1)
        second = ((_rotated(second, 31) + first) * 5 + 0x38495AB5) & _MASK
    rest = data[whole:]
    second ^= _scramble(int.from_bytes(rest[8:], "little"), _C2, 33, _C1)
    first ^= _scramble(int.from_bytes(rest[:8], "little"), _C1, 31, _C2)
    first ^= len(data)
    second ^= len(data)
    first = (first + second) & _MASK
    second = (second + first) & _MASK
    return (_mixed(first) + _mixed(second)) & _MASK


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & _MASK


def _scramble(value: int, before: int, bits: int, after: int) -> int:
    return _rotated(value * before & _MASK, bits) * after & _MASK


def _mixed(value: int) -> int:
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & _MASK
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33
