"""A fleet on a virtual clock: clients, a router, and engines, with all that travels between them.

Theory of operation. One heap holds what is going to happen, by time; at one instant, in this order:

    SUBMIT   a request reaches its engine                      network_s after it was routed
    EVENTS   a batch of KV events reaches the router           kv_delay_s after the step that caused it
    FIRST    a first token passes the router                   network_s after the step
    FINISH   an answer has ended; the client thinks, then      network_s after the step
             sends its next turn or is done
    SCRAPE   an engine's metrics reach the router              every scrape_interval_s, engines out of phase
    STEP     an engine ends a step and begins the next
    SEND     a client sends a turn; it is routed at once
    START    sessions arrive
    SAMPLE   a time bin ends
    LOOK     a router that holds requests looks for room       every look_s while it holds any, and
                                                               with first tokens, ends and metrics

An engine is in the heap only while it is busy. How KV events travel is in `event_link`.

Deterministic: one seed, one result, to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

from extproc.core.errors import NoEndpointError
from extproc.sim.clients import Clients, Run
from extproc.sim.engine_types import EngineConfig, EngineRequest, Finished, RequestTooLongError, StepResult
from extproc.sim.event_link import EventLink
from extproc.sim.fleet_engine import FleetEngine
from extproc.sim.measures import Measures
from extproc.sim.routing import (
    HELD,
    FleetFacts,
    FleetRouter,
    HoldFacts,
    HoldsRequests,
    RouterMaker,
    SeesEngines,
    SimRequest,
)
from extproc.sim.sessions import Turn, Workload

_SUBMIT, _EVENTS, _FIRST, _FINISH, _SCRAPE, _STEP, _SEND, _START, _SAMPLE, _LOOK = range(10)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How the fleet is built. Times in seconds.

    Attributes:
        replicas: number of engines.
        engine: each of them.
        network_s: one way, between router and engine; and from router to client, none.
        scrape_interval_s: how often metrics are read, unless the router has an interval of its own.
        kv_delay_s: from the end of a step to the arrival of its KV events.
        kv_events: whether the engines publish KV events.
        kv_loss: share of KV event batches that are lost.
        kv_replay: whether lost batches can be asked for again.
        replay_s: how long such an answer takes.
        warmup_requests: the first ones sent, which are not measured.
        bin_s: width of the bins in which load is sampled.
        seed: of losses and of the router's randomness.
        look_s: how often a router that holds requests looks for room.
        hold: how it holds them.

    Raises:
        ValueError: a value is out of range.
    """

    replicas: int = 4
    engine: EngineConfig = field(default_factory=EngineConfig)
    network_s: float = 0.0005
    scrape_interval_s: float = 1.0
    kv_delay_s: float = 0.001
    kv_events: bool = True
    kv_loss: float = 0.0
    kv_replay: bool = True
    replay_s: float = 0.02
    warmup_requests: int = 0
    bin_s: float = 0.5
    seed: int = 0
    look_s: float = 0.02
    hold: HoldFacts = field(default_factory=HoldFacts)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}; a fleet has at least 1")
        for name in ("network_s", "kv_delay_s", "replay_s", "warmup_requests"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("scrape_interval_s", "bin_s", "look_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.kv_loss <= 1:
            raise ValueError(f"kv_loss is {self.kv_loss}; it is a share, 0 to 1")


class _Flight:
    """A request under way."""

    __slots__ = ("first_at", "measured", "request", "run", "sent_at", "turn", "worker")

    def __init__(self, request: SimRequest, run: Run, turn: Turn, now: float, *, measured: bool) -> None:
        self.request = request
        self.run = run
        self.turn = turn
        self.sent_at = now
        self.measured = measured
        self.worker = -1
        self.first_at = now


class Fleet:
    """One run of one workload under one router.

    Args:
        workload: iterated once.
        make: maker of the router.
        settings: the fleet.
        progress: told the number of ended requests now and then.
    """

    def __init__(
        self,
        workload: Workload,
        make: RouterMaker,
        settings: FleetSettings,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        if workload.block_size != settings.engine.block_size:
            raise ValueError(
                f"the workload {workload.name} has blocks of {workload.block_size} tokens, the engines of "
                f"{settings.engine.block_size}; make them equal"
            )
        self.settings = settings
        facts = FleetFacts(
            settings.replicas,
            settings.engine,
            settings.scrape_interval_s,
            settings.kv_delay_s,
            settings.kv_events,
            hold=settings.hold,
        )
        self.router: FleetRouter = make(facts, settings.seed)
        self._scrape_interval_s: float = getattr(self.router, "scrape_interval_s", settings.scrape_interval_s)
        self.engines = [FleetEngine(settings.engine) for _ in range(settings.replicas)]
        self.measures = Measures(settings.replicas, settings.bin_s)
        self._wants_events = settings.kv_events and getattr(self.router, "wants_kv_events", True)
        for engine in self.engines:
            engine.pool.emit_events = self._wants_events
        if isinstance(self.router, SeesEngines):
            self.router.attach(self.engines, settings.network_s)
        self._clients = Clients(workload)
        self._progress = progress
        self._loss = Random(settings.seed ^ 0x10552)  # noqa: S311 - a simulation
        replay_s = settings.replay_s if settings.kv_replay else None
        self._links = [EventLink(settings.kv_delay_s, replay_s) for _ in self.engines]
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = 0
        self._flights: dict[str, _Flight] = {}
        self._held: dict[str, _Flight] = {}
        self._looking = False  # for room for them, before long
        self._sent = 0
        self._ended = 0
        self._now = 0.0
        self._arrival = 0.0  # the last one that is in the heap

    def run(self) -> Measures:
        """Run to the end of the workload."""
        interval, replicas = self._scrape_interval_s, self.settings.replicas
        for worker in range(replicas):
            self._push(interval * worker / replicas, _SCRAPE, worker)
        self._push(0.0, _START, None)
        self._push(self.settings.bin_s, _SAMPLE, None)
        handlers = self._handlers()
        heap = self._heap
        while not self._clients.done:
            now, key, _, what = heappop(heap)
            self._now = now
            handlers[key](now, what)
        measures = self.measures
        measures.ended = self._now
        measures.preemptions = sum(engine.stats.preemptions for engine in self.engines)
        return measures

    def _handlers(self) -> tuple[Callable[[float, Any], None], ...]:
        """By kind of what happens."""
        return (
            self._submit,
            self._events,
            self._first,
            self._finish,
            self._scrape,
            self._step,
            self._send,
            self._start,
            self._sample,
            self._look,
        )

    def _push(self, at: float, kind: int, what: Any) -> None:
        self._order += 1
        heappush(self._heap, (at, kind, self._order, what))

    # --- clients -----------------------------------------------------------------------------------------

    def _start(self, now: float, _: Any) -> None:
        for run in self._clients.start(now):
            self._go_on(run, now)
        self._await_arrival()

    def _await_arrival(self) -> None:
        arrival = self._clients.next_arrival
        if arrival is not None and arrival > self._arrival:
            self._arrival = arrival
            self._push(arrival, _START, None)

    def _go_on(self, run: Run, now: float) -> None:
        """Send the next turn of a session, or end it."""
        turn = run.next_turn()
        if turn is not None:
            at = now + (turn.think_s if run.turn else 0.0)
            self._push(at, _SEND, (run, turn))
            return
        if run.measured and run.turn >= 0:
            self.measures.rollout.append(now - run.began)
        self._session_ended(run, now)

    def _session_ended(self, run: Run, now: float) -> None:
        self._clients.ended(run)
        if run.session.arrival_s is None:
            for begun in self._clients.start(now):
                self._go_on(begun, now)
            self._await_arrival()

    def _send(self, now: float, what: Any) -> None:
        run, turn = what
        request = self._request(run, turn)
        measured = self._sent >= self.settings.warmup_requests
        self._sent += 1
        flight = _Flight(request, run, turn, now, measured=measured)
        if measured:
            self.measures.requests += 1
            if self.measures.began is None:
                self.measures.began = now
        else:
            run.measured = False
        try:
            flight.worker = self.router.route(request, now)
        except NoEndpointError as error:
            self._failed(flight, str(error), now, routed=False)
            return
        if flight.worker == HELD:
            self._held[request.request_id] = flight
            if not self._looking:
                self._looking = True
                self._push(now + self.settings.look_s, _LOOK, None)
            self._released(now)  # what came may have displaced another
        else:
            self._routed(flight, now)

    def _routed(self, flight: _Flight, now: float) -> None:
        self._flights[flight.request.request_id] = flight
        if flight.measured:
            self.measures.sent[flight.worker] += 1
        self._push(now + self.settings.network_s, _SUBMIT, flight)

    def _released(self, now: float) -> None:
        """Send on what the router holds no longer, where it holds anything."""
        if not self._held or not isinstance(self.router, HoldsRequests):
            return
        for request_id, worker in self.router.released(now):
            flight = self._held.pop(request_id)
            if worker is None:
                self._failed(flight, "held too long", now, routed=False)
            else:
                flight.worker = worker
                self._routed(flight, now)

    def _look(self, now: float, _: Any) -> None:
        self._released(now)
        self._looking = bool(self._held)
        if self._looking:
            self._push(now + self.settings.look_s, _LOOK, None)

    def _request(self, run: Run, turn: Turn) -> SimRequest:
        size, session = self.settings.engine.block_size, run.session
        return SimRequest(
            request_id=f"{run.key}.{run.turn}",
            session_id=session.id,
            group=session.group,
            tenant=session.tenant,
            turn=run.turn,
            prompt_tokens=turn.prompt_tokens,
            block_size=size,
            prefix=tuple(turn.blocks[: (turn.prompt_tokens - 1) // size]),
            max_output_tokens=turn.max_output_tokens,
            truth=turn,
        )

    # --- requests ------------------------------------------------------------------------------------------

    def _submit(self, now: float, what: Any) -> None:
        flight: _Flight = what
        turn, engine = flight.turn, self.engines[flight.worker]
        before = engine.next_deadline()
        try:
            engine.submit(
                EngineRequest(flight.request.request_id, turn.prompt_tokens, turn.output_tokens, turn.blocks),
                now,
            )
        except RequestTooLongError:
            self._failed(flight, "longer than max_model_len", now, routed=True)
            return
        deadline = engine.next_deadline()
        if deadline is not None and deadline != before:
            self._push(deadline, _STEP, flight.worker)

    def _step(self, now: float, what: Any) -> None:
        worker: int = what
        engine, heap = self.engines[worker], self._heap
        if engine.next_deadline() != now:
            return  # a request came, and the engine's next step ended earlier than this
        while True:
            for result in engine.tick(now):
                self._publish(worker, result)
            deadline = engine.next_deadline()
            if deadline is None:
                return
            # Nothing else happens before its next step ends: no need to queue for it.
            if heap and heap[0][0] <= deadline:
                self._push(deadline, _STEP, worker)
                return
            self._now = now = deadline

    def _publish(self, worker: int, result: StepResult) -> None:
        """Send off what a step brought."""
        settings, at = self.settings, result.at
        if result.events:
            self._publish_events(worker, result)
        for first in result.first_tokens:
            self._push(at + settings.network_s, _FIRST, first.request.request_id)
        for done in result.finished:
            self._push(at + settings.network_s, _FINISH, done)

    def _publish_events(self, worker: int, result: StepResult) -> None:
        loss, link = self.settings.kv_loss, self._links[worker]
        if loss and self._loss.random() < loss:
            link.lose(result.events)
            return
        for at, events in link.send(result.events, result.at):
            self._push(at, _EVENTS, (worker, events))

    def _events(self, now: float, what: Any) -> None:
        worker, events = what
        if events is None:
            self.router.on_kv_gap(worker, now)
        else:
            self.router.on_kv_events(worker, events, now)

    def _first(self, now: float, what: Any) -> None:
        request_id: str = what
        self._flights[request_id].first_at = now
        self.router.on_first_token(request_id, now)
        self._released(now)

    def _finish(self, now: float, what: Any) -> None:
        done: Finished = what
        request_id = done.request.request_id
        flight = self._flights.pop(request_id)
        output = flight.turn.output_tokens
        self.router.on_finished(request_id, done.cached_tokens, output, now)
        self._released(now)
        if flight.measured:
            sent = flight.sent_at
            self.measures.finished(
                flight.request.group,
                flight.first_at - sent,
                now - sent,
                flight.turn.prompt_tokens,
                done.cached_tokens,
                output,
            )
        self._count()
        self._go_on(flight.run, now)

    def _failed(self, flight: _Flight, why: str, now: float, *, routed: bool) -> None:
        if routed:
            del self._flights[flight.request.request_id]
            self.router.on_finished(flight.request.request_id, None, None, now)
        if flight.measured:
            self.measures.fail(why, flight.request.group)
        self._count()
        self._session_ended(flight.run, now)

    def _count(self) -> None:
        self._ended += 1
        if self._progress is not None and not self._ended % 256:
            self._progress(self._ended)

    # --- what goes on by itself --------------------------------------------------------------------------

    def _scrape(self, now: float, what: Any) -> None:
        worker: int = what
        engine = self.engines[worker]
        engine.settle(now)
        self.router.on_metrics(worker, engine.snapshot(), now)
        self._released(now)
        self._push(now + self._scrape_interval_s, _SCRAPE, worker)

    def _sample(self, now: float, _: Any) -> None:
        if self.measures.began is not None:
            self.measures.sample(
                [engine.decode_blocks for engine in self.engines],
                [engine.waiting for engine in self.engines],
            )
        self._push(now + self.settings.bin_s, _SAMPLE, None)
