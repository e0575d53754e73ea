"""What routes requests in the simulated fleet: ours, peers and bounds alike.

A router is told what its counterpart in production would learn, when it would learn it, and nothing else:
first tokens and ends as the client side sees them, KV events after their delay (or never, when lost), and
metrics as they were at the last scrape. Workers are indices, 0 to `replicas - 1`. Calls come in the order of
virtual time; `now` is that time in seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from extproc.core.admission_queue import QueueSettings
from extproc.core.errors import WarmrouteError
from extproc.core.saturation import RoomSettings
from extproc.core.types import EngineMetrics, KvEvent
from extproc.sim.engine_types import EngineConfig
from extproc.sim.fleet_engine import FleetEngine
from extproc.sim.sessions import Turn


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request as it reaches the router.

    Attributes:
        request_id: unique in the run.
        session_id: of the conversation; what a session header or cookie would carry.
        group: statistics class of the session.
        tenant: whose request it is.
        turn: index in its session, from 0.
        prompt_tokens: of the whole prompt.
        block_size: tokens per block.
        prefix: chained hashes of the `(prompt_tokens - 1) // block_size` blocks an engine can hit (vLLM's
            rule: the last token is always computed). Their hashes are those of the KV events.
        max_output_tokens: the limit the client sent; None: none.
        truth: the turn itself, with the output that is still to come. For bounds only: a router that
            reads it is no router.
    """

    request_id: str
    session_id: str
    group: str
    tenant: str
    turn: int
    prompt_tokens: int
    block_size: int
    prefix: tuple[int, ...]
    max_output_tokens: int | None
    truth: Turn


HELD = -1
"""In the place of a worker: the request is held, and `HoldsRequests.released` will tell."""


@dataclass(frozen=True, slots=True)
class HoldFacts:
    """How a router that holds requests is configured; `priorities` and `weights` by tenant, else 0 and 1."""

    room: RoomSettings = field(default_factory=RoomSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    max_wait_s: float = 10.0
    priorities: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """What an operator could configure a router with.

    Attributes:
        replicas: number of workers.
        engine: limits and time model of each of them.
        scrape_interval_s: how often metrics are read.
        kv_delay_s: from the end of an engine step to the arrival of its KV events.
        kv_events: whether the engines publish any.
        model: name of the model.
        hold: how requests are held, where they are.
    """

    replicas: int
    engine: EngineConfig
    scrape_interval_s: float = 1.0
    kv_delay_s: float = 0.001
    kv_events: bool = True
    model: str = "sim"
    hold: HoldFacts = field(default_factory=HoldFacts)


class FleetRouter(Protocol):
    """A router under test. Deterministic: all its randomness comes from the seed it was made with.

    One that has an attribute `wants_kv_events = False` is spared them, which makes the run faster. One that
    has an attribute `scrape_interval_s` is told metrics as often as that, whatever the fleet's setting.
    """

    @property
    def name(self) -> str:
        """What reports call it."""
        ...

    def route(self, request: SimRequest, now: float) -> int:
        """The worker for `request`; whatever load the router keeps is booked in the same call."""
        ...

    def on_first_token(self, request_id: str, now: float) -> None:
        """The first token of a streamed answer passed by."""
        ...

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """A request ended. Both None: it failed; the engine refused or dropped it."""
        ...

    def on_kv_events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """One batch of `worker`'s KV events. `BlockStored.block_hashes` are the hashes of requests."""
        ...

    def on_kv_gap(self, worker: int, now: float) -> None:
        """Events of `worker` were lost and cannot be replayed; those after the gap still come."""
        ...

    def on_metrics(self, worker: int, metrics: EngineMetrics, now: float) -> None:
        """A scrape of `worker` came back."""
        ...


RouterMaker = Callable[[FleetFacts, int], FleetRouter]
"""`make(facts, seed)`: a fresh router for one run.

A maker whose dependency is not installed raises `PolicyUnavailableError`.
Peers are found in `loadtests.peers.PEERS: dict[str, RouterMaker]`.
"""


class PolicyUnavailableError(WarmrouteError):
    """This policy cannot run here; the message says what to install."""


@runtime_checkable
class SeesEngines(Protocol):
    """A bound that looks into the engines, as no real router can."""

    def attach(self, engines: Sequence[FleetEngine], network_s: float) -> None:
        """Called once, before the first request. `network_s`: from `route` to the engine."""
        ...


@runtime_checkable
class HoldsRequests(Protocol):
    """A router whose `route` may answer `HELD`."""

    def released(self, now: float) -> Sequence[tuple[str, int | None]]:
        """Requests that are held no longer, in order: where they go; None: they are refused."""
        ...


class NullRouter:
    """Convenience base: ignores every signal. `route` is left to the subclass."""

    def on_first_token(self, request_id: str, now: float) -> None:
        """Ignored."""

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """Ignored."""

    def on_kv_events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """Ignored."""

    def on_kv_gap(self, worker: int, now: float) -> None:
        """Ignored."""

    def on_metrics(self, worker: int, metrics: EngineMetrics, now: float) -> None:
        """Ignored."""
