"""The other replicas, as plain values for people and dashboards."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """One peer.

    Attributes:
        address: where it is reached.
        name: as it told; empty: never.
        connected: whether it is being heard.
        silent_s: since its last message; None: it counts for nothing.
        weight: how much what it told still counts, 0 to 1.
        sequences: that it has on all workers, as told.
        waiting: news about its requests that it has not taken yet.
        connects: how often it began to be heard.
        error: why it is not heard, last.
    """

    address: str
    name: str
    connected: bool
    silent_s: float | None
    weight: float
    sequences: int
    waiting: int
    error: str | None
    connects: int = 0


@dataclass(frozen=True, slots=True)
class PeersStatus:
    """All of them, and what was handed on and refused, since the start.

    Attributes:
        name: ours.
        peers: that we know the addresses of.
        forwarded: news about others' requests.
        taken: news about ours, from others.
        unknown: news about requests of nobody we know.
        dropped: news that could not be delivered.
        listeners: replicas that hear us, now.
        indexes: how often we told what we know of the engines' caches.
        refused: by kind: `call` (to us: without the token, too many, or of no form), `update` (about
            load, not plausible), `signal` (about a request, not plausible), `replica` (updates of one replica
            too many), `block` (of prompts on their way, beyond what is kept).
    """

    name: str
    peers: tuple[PeerStatus, ...]
    forwarded: int = 0
    taken: int = 0
    unknown: int = 0
    dropped: int = 0
    listeners: int = 0
    indexes: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
