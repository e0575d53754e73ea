"""Endpoint discovery (EDS) as a server speaks it: which list of workers an Envoy is due. No I/O.

Theory of operation
===================

One stream serves one Envoy (thread pools share it). The client names the resources it wants; the server sends
a list now and after every change; the client answers each with an acknowledgement, or a refusal that carries
an error. Two variants of the transport differ in what is sent:

- state of the world: every subscribed resource, whenever one of them changed;
- delta: resources that changed, and names of those that are gone. The client says at the beginning which
  versions it still has from an earlier stream.

A *version* is a digest of the content, so several Warmroute replicas that know the same workers give the same
versions, and an Envoy that moves from one to another need not be told anything new.

**An incomplete list must not replace a complete one.** After a start, until every source of workers has
answered, the snapshot is not `complete`. An Envoy that still has a list keeps it until ours is complete,
however long that takes; one that has none is given what we know as soon as the snapshot is `usable`.

**Health** is for Envoy's own balancing: of requests that name no worker, or whose list is used up. A worker
that the router names is taken whatever its health (`override_host` does not ask for it), so all that may be
named are told, and how they are:

| a worker is sent | told as | Envoy's own balancing |
|---|---|---|
| any request of its pool | healthy | takes it |
| those only that no other may serve | degraded | leaves it out while half of the workers are healthy |
| none | unhealthy | leaves it out while half of the workers are healthy or degraded |

Answers to an outdated nonce say nothing about the newest list and are ignored, as the xDS protocol demands. A
refused list is not sent again until it changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import xxhash

EDS_SERVICE = "envoy.service.endpoint.v3.EndpointDiscoveryService"
ASSIGNMENT_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

ALL_WORKERS = "workers"
"""The resource with the workers of all pools; `workers/POOL` has those of one pool."""


def pool_resource(pool: str) -> str:
    """Name of the resource with one pool's workers."""
    return f"{ALL_WORKERS}/{pool}"


class Health(IntEnum):
    """How an endpoint is, in Envoy's words, the best first. See the module."""

    HEALTHY = 0
    DEGRADED = 1
    UNHEALTHY = 2


OVERPROVISIONING = 200
"""Healthy endpoints get this much of the traffic, in percent of their share of all endpoints, and degraded
ones what is left: nothing where half are healthy. Unhealthy ones, too, get nothing down to there (Envoy's
panic threshold)."""


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """One endpoint (`ip:port`) to tell Envoy of, and how it is."""

    endpoint: str
    health: Health = Health.HEALTHY


@dataclass(frozen=True, slots=True)
class Assignment:
    """One resource: a version, and what it contains in the order of discovery."""

    version: str
    workers: tuple[KnownWorker, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All resources. `complete`: every source has answered; `usable`: fit for an Envoy that has nothing."""

    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    complete: bool = False
    usable: bool = False


def snapshot(pools: Mapping[str, Sequence[KnownWorker]], *, complete: bool, usable: bool = False) -> Snapshot:
    """All resources for the workers of each pool: one with everybody, and one per pool.

    An endpoint that several pools have is as it is in the pool where it is best.
    """
    everybody: dict[str, KnownWorker] = {}
    assignments: dict[str, Assignment] = {}
    for pool, workers in pools.items():
        unique = {worker.endpoint: worker for worker in workers}
        assignments[pool_resource(pool)] = _assignment(unique.values())
        for worker in unique.values():
            seen = everybody.get(worker.endpoint)
            if seen is None or worker.health < seen.health:
                everybody[worker.endpoint] = worker
    return Snapshot({ALL_WORKERS: _assignment(everybody.values()), **assignments}, complete, usable)


def _assignment(workers: Iterable[KnownWorker]) -> Assignment:
    known = tuple(workers)
    content = "\n".join(f"{worker.endpoint} {worker.health.name}" for worker in known)
    return Assignment(xxhash.xxh3_64_hexdigest(content.encode()), known)


@dataclass(frozen=True, slots=True)
class Push:
    """What to send now."""

    nonce: str
    version: str
    assignments: Mapping[str, Assignment]
    removed: tuple[str, ...] = ()


class StateOfTheWorld:
    """One stream of the state-of-the-world variant."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._informed = False
        self._begun = False
        self._nonce = 0
        self._sent: dict[str, str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What the client asked for."""
        return self._names

    def receive(self, names: Sequence[str], version: str, nonce: str) -> bool:
        """Take a request. False if it answers an outdated response and was ignored."""
        if not self._begun:
            self._begun, self._informed = True, bool(version)
        elif nonce and nonce != str(self._nonce):
            return False
        if set(names) - set(self._names):
            self._sent = None  # whoever asks for more is waiting for an answer
        self._names = tuple(dict.fromkeys(names))
        return True

    def due(self, snapshot: Snapshot) -> Push | None:
        """The response to send now, if one is. It counts as sent."""
        if not _may_tell(snapshot, informed=self._informed):
            return None
        known = {name: snapshot.assignments[name] for name in self._names if name in snapshot.assignments}
        versions = {name: assignment.version for name, assignment in known.items()}
        if not known or versions == self._sent:
            return None
        self._sent = versions
        self._nonce += 1
        return Push(str(self._nonce), _joint(versions.values()), known)


class Delta:
    """One stream of the incremental variant."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._has: dict[str, str] = {}  # what the client has, by what it said and what was sent
        self._waiting: dict[str, None] = {}  # asked for, not answered yet
        self._informed = False
        self._begun = False
        self._nonce = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What the client asked for."""
        return tuple(self._names)

    def receive(
        self, subscribe: Sequence[str], unsubscribe: Sequence[str], initial: Mapping[str, str]
    ) -> None:
        """Take a request; `initial` counts in the first one only."""
        if not self._begun:
            self._begun, self._informed = True, bool(initial)
            self._has = dict(initial)
        for name in subscribe:
            if name in self._names:
                self._has.pop(name, None)  # asking again means: send it again
            self._names[name] = None
            self._waiting[name] = None
        for name in unsubscribe:
            self._names.pop(name, None)
            self._has.pop(name, None)
            self._waiting.pop(name, None)

    def due(self, snapshot: Snapshot) -> Push | None:
        """The response to send now, if one is. It counts as sent."""
        if not _may_tell(snapshot, informed=self._informed):
            return None
        changed: dict[str, Assignment] = {}
        removed: list[str] = []
        for name in self._names:
            assignment = snapshot.assignments.get(name)
            if assignment is None:
                if name in self._has or name in self._waiting:
                    removed.append(name)
            elif assignment.version != self._has.get(name):
                changed[name] = assignment
        if not changed and not removed:
            return None
        for name in removed:
            self._has.pop(name, None)
            self._waiting.pop(name, None)
        for name, assignment in changed.items():
            self._has[name] = assignment.version
            self._waiting.pop(name, None)
        self._nonce += 1
        versions = (one.version for one in snapshot.assignments.values())
        return Push(str(self._nonce), _joint(versions), changed, tuple(removed))


def _may_tell(snapshot: Snapshot, *, informed: bool) -> bool:
    return snapshot.complete or (snapshot.usable and not informed)


def _joint(versions: Iterable[str]) -> str:
    return "-".join(versions)
