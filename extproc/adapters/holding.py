"""What is asked of those who hold requests, what they are told, and what they tell."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.core.admission_queue import QueueSettings
from extproc.core.saturation import RoomSettings
from extproc.core.types import RoutingRequest

MARGIN_S = 1.0
"""What the gateway is asked for beyond the longest wait: to carry the answer."""


class Ending(StrEnum):
    """How the wait of a request ended. `PASSED`: there was none."""

    PASSED = "passed"
    ADMITTED = "admitted"
    REFUSED = "refused"  # at once, or displaced later
    EXPIRED = "expired"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class HoldSettings:
    """How requests are held.

    Attributes:
        room: when a worker is full.
        queue: bounds of the queue of each pool.
        max_wait_s: longest wait.
        priority_header: request header with a priority; a higher number goes first. None: none is read.
        deadline_headers: request headers that say how many milliseconds the client waits; the first counts.
    """

    room: RoomSettings = field(default_factory=RoomSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    max_wait_s: float = 10.0
    priority_header: str | None = "x-warmroute-priority"
    deadline_headers: tuple[str, ...] = ("x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms")


@dataclass(frozen=True, slots=True)
class Wait:
    """What became of one request here. `held_ms` is 0 where it did not wait."""

    request: RoutingRequest
    ending: Ending
    held_ms: float
    priority: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants a worker.

    Attributes:
        request: as the router takes it.
        headers: the client's, by lower-case name.
        size: bytes that are kept while it waits.
        more_time: asks the gateway to wait so many seconds; None: it cannot be asked.
        mark: told when a stage is over.
    """

    request: RoutingRequest
    headers: Mapping[str, str]
    size: int
    more_time: Callable[[float], Awaitable[None]] | None = None
    mark: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class HeldState:
    """What one pool looks like from here.

    Attributes:
        pool: its name.
        requests: that wait.
        bytes: of their bodies and prompts.
        waiting: requests by tenant and priority.
        full: its ready workers, and why each has no room; None: it has.
        wait_s: what one more request without a tenant or priority would wait; None: not known.
        oldest_s: how long the oldest has waited.
    """

    pool: str
    requests: int
    bytes: int
    waiting: Mapping[tuple[str, int], int]
    full: Mapping[str, str | None]
    wait_s: float | None
    oldest_s: float
