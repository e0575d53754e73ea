"""Holds requests while every worker that may serve them is full, and lets them go as soon as one is not.

`extproc.core.admission_queue` says who is next and who has to go, `extproc.core.saturation` whether there is
room. Here are the clock, the waiting, and what the gateway and the client are told. A request that goes is
scheduled in the same step in which room was found for it, so its worker is chosen as late as can be, and the
next one sees it there.

    event                                   what happens
    a request comes, nobody waits, room     it is scheduled at once
    a request comes, else                   it waits; the gateway is asked for more time, once
    a first token, an end, a scrape, or     whoever there is room for is scheduled, in the queue's order
      `POLL_S` later
    its time is up, the queue overflows,    429 with Retry-After
      or it would hopelessly wait too long
    the client leaves                       its place is free; if it was scheduled in that very moment, its
                                            lease is given back

A request may wait `max_wait_s`, or as long as its own deadline leaves time, whichever is shorter. It is
refused at once where the predicted wait is more than `HOPELESS` times that. Retry-After is the predicted wait
of one more request like it.

Failure has a direction here too: whatever goes wrong with holding, requests go on as if nothing were held.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from extproc.adapters.admission import RefusedError
from extproc.adapters.holding import MARGIN_S, Ask, Ending, HeldState, HoldSettings, Wait
from extproc.core.admission_queue import AdmissionQueue, Waiting, work_of
from extproc.core.rollout import Mode
from extproc.core.router import Router
from extproc.core.saturation import Saturation
from extproc.core.tenancy import EVERYTHING, TenantBook
from extproc.core.types import Admitted, Completion, Decision, Outcome, RoutingRequest
from extproc.protocol.hold_hints import priority_of, timeout_ms
from extproc.protocol.rejections import overloaded

_log = logging.getLogger("warmroute.held_requests")

POLL_S = 0.02
"""A queue at a worker gets shorter by itself: nobody tells."""

HOPELESS = 2.0
"""Predictions err; only a wait that is beyond what is possible by this factor is not even begun."""

_NOT_HELD = frozenset({"method", "path"})  # causes of load-only routing: nothing is generated
_MOST_RETRY_S = 60
_AT_ONCE = 16  # requests that go in one turn of the loop
_LEFT = "warmroute_left_while_held"
_NOBODYS = "\0"  # in the place of an adapter


@dataclass(slots=True)
class _Held:
    ask: Ask
    entry: Waiting
    answer: "asyncio.Future[Decision]"


class HeldRequests:
    """One queue for each pool. One event loop owns it.

    Args:
        router: schedules; owned by the same loop.
        settings: see there.
        clock: monotonic seconds.
        tenants: their weights, and the highest priority each may ask for.
        on_wait: told what became of each request.
        on_abandoned: told the lease, and how it ended, of a request whose client left as it was scheduled.

    Attributes:
        faults: times that holding failed, and a request went on as if there were none; since the start.
    """

    def __init__(
        self,
        router: Router,
        settings: HoldSettings,
        clock: Callable[[], float],
        tenants: TenantBook = EVERYTHING,
        *,
        on_wait: Callable[[Wait], None] = lambda _wait: None,
        on_abandoned: Callable[[str, Completion], None] | None = None,
    ) -> None:
        self.settings = settings
        self.saturation = Saturation(router, settings.room)
        self.on_wait = on_wait
        self.on_abandoned = on_abandoned
        self.faults = 0
        self._router = router
        self._clock = clock
        self._tenants = tenants
        self._queues: dict[str, AdmissionQueue] = {}
        self._held: dict[str, _Held] = {}  # by number, which is the entry's id
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looking = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._held)

    def state(self) -> list[HeldState]:
        """Every pool of which a request has ever come."""
        now = self._clock()
        return [
            HeldState(
                pool=pool,
                requests=len(queue),
                bytes=queue.size,
                waiting=queue.waiting_by(),
                full={
                    str(worker): None if why is None else why.value
                    for worker, why in self.saturation.workers(pool, now)
                },
                wait_s=queue.wait_s("", 0, 1.0, now) if queue else 0.0,
                oldest_s=max((now - entry.arrived_at for entry in queue), default=0.0),
            )
            for pool, queue in self._queues.items()
        ]

    async def schedule(self, ask: Ask) -> Decision:
        """A worker for a request, now or as soon as there is room.

        Raises:
            RefusedError: it cannot wait any longer, or at all.
            NoEndpointError: see `Router.schedule`.
        """
        if self._closed or not self._holds(ask.request):
            return self._router.schedule(ask.request, self._clock(), ask.mark)
        try:
            held = self._enter(ask)
        except Exception:
            self._fault()
            held = None
        return self._schedule(ask) if held is None else await self._wait(held)

    def look(self) -> None:
        """Something has changed: see soon whether there is room."""
        if self._held and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def close(self) -> None:
        """Let all go that wait, and all that come from now on: we stop."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._release_all()

    # --- coming --------------------------------------------------------------------------------------

    def _holds(self, request: RoutingRequest) -> bool:
        """Whether this request may be held: it is load that we place."""
        return request.mode is Mode.ENFORCE and request.load_only not in _NOT_HELD

    def _enter(self, ask: Ask) -> _Held | None:
        """Put a request into its queue; None: it can go at once."""
        now, request = self._clock(), ask.request
        queue = self._queues.get(request.pool)
        if queue is None:
            queue = self._queues[request.pool] = AdmissionQueue(self.settings.queue)
        policy = self._tenants.policy(request.tenant)
        most = None if policy is None else policy.priority
        priority = priority_of(ask.headers, self.settings.priority_header, request.priority, most)
        request.admission = Admitted(0.0, priority)
        if not queue and self.saturation.room(request, now):
            self._tell(ask, Ending.PASSED, 0.0, priority)
            return None
        self._number += 1
        entry = Waiting(
            id=str(self._number),
            tenant=request.tenant,
            weight=1.0 if policy is None or policy.weight is None else policy.weight,
            priority=priority,
            work=self._work(request, now),
            size=ask.size,
            arrived_at=now,
            leave_by=now + self._patience_s(ask, now),
            place=(request.subset, self._line_of(request.namespace.adapter)),
        )
        held = self._held[entry.id] = _Held(ask, entry, asyncio.get_running_loop().create_future())
        try:
            self._line_up(queue, entry, now)
        except Exception:
            self._fault()
            self._held.pop(entry.id, None)
            queue.leave(entry.id)
            self._release_lost(now)
            return held if held.answer.done() else None
        return held

    def _line_of(self, adapter: str | None) -> str | None:
        """Each adapter that is anywhere has a line; names that clients make up are one line all together."""
        return adapter if adapter is None or self._router.adapters.known(adapter) else _NOBODYS

    def _line_up(self, queue: AdmissionQueue, entry: Waiting, now: float) -> None:
        wait_s = queue.wait_s(entry.tenant, entry.priority, entry.weight, now)
        queue.enter(entry, now)
        self._drain(queue, now)
        if entry.id in queue:
            if wait_s is not None and wait_s > HOPELESS * (entry.leave_by - now):
                queue.leave(entry.id)
                self._refuse(entry, Ending.REFUSED, wait_s, now)
            for gone in queue.overflow():
                self._refuse(gone, Ending.REFUSED, self._retry_s(queue, gone, now), now)
        self._arm()

    def _work(self, request: RoutingRequest, now: float) -> float:
        expected = self._router.learned.outputs.estimate(request, now).expected
        return work_of(request.prompt_tokens, expected, request.sequences)

    def _patience_s(self, ask: Ask, now: float) -> float:
        """How long a request can wait.

        An answer that is not streamed has to be generated before its deadline: the time that takes on an
        idle worker is left for it.
        """
        most = self.settings.max_wait_s
        deadline_ms = timeout_ms(ask.headers, self.settings.deadline_headers)
        if deadline_ms is None:
            return most
        request, learned = ask.request, self._router.learned
        needs_ms = learned.ttft.of(request.pool).typical.wait_ms(0.0)
        if not request.stream:
            steps = learned.steps.of(request.pool).coefficients
            needs_ms += learned.outputs.estimate(request, now).expected * steps.tpot_ms(1.0, 0.0)
        return max(0.0, min(most, (deadline_ms - needs_ms) / 1000.0))

    # --- waiting and going ---------------------------------------------------------------------------

    async def _wait(self, held: _Held) -> Decision:
        try:
            if not held.answer.done() and held.ask.more_time is not None:
                await held.ask.more_time(max(0.0, held.entry.leave_by - self._clock()) + MARGIN_S)
            return await held.answer
        except asyncio.CancelledError:
            self._left(held)
            raise
        except RefusedError:
            raise
        except Exception:
            if held.answer.done():
                return held.answer.result()  # or what scheduling itself raised
            self._fault()
            self._forget(held.entry)
            return self._schedule(held.ask)

    def _left(self, held: _Held) -> None:
        """The client is gone."""
        answer, entry = held.answer, held.entry
        if self._forget(entry) is not None:
            self._over(held, Ending.LEFT, self._clock())
            self.look()
        elif answer.done() and not answer.cancelled() and answer.exception() is None:  # nobody takes it
            gone = Completion(Outcome.CANCELLED, details=_LEFT)
            if self.on_abandoned is not None:
                self.on_abandoned(answer.result().lease_id, gone)
            else:
                self._router.release(answer.result().lease_id, gone, self._clock())

    def _forget(self, entry: Waiting) -> Waiting | None:
        """It no longer waits. None: it did not."""
        held = self._held.pop(entry.id, None)
        if held is None:
            return None
        return self._queues[held.ask.request.pool].leave(entry.id)

    def _schedule(self, ask: Ask) -> Decision:
        now, request = self._clock(), ask.request
        try:
            below = self.saturation.uncapped(request, now)
        except Exception:
            self._fault()
            below = None
        if below:
            request.subset = below
        return self._router.schedule(request, now, ask.mark)

    def _look(self) -> None:
        self._looking = False
        now = self._clock()
        try:
            for queue in self._queues.values():
                for late in queue.expire(now):
                    self._refuse(late, Ending.EXPIRED, self._retry_s(queue, late, now), now)
                self._drain(queue, now)
        except Exception:
            self._fault()
            self._release_all()
        self._arm()

    def _drain(self, queue: AdmissionQueue, now: float) -> None:
        """Let go whomever there is room for."""

        def fits(entry: Waiting) -> bool:
            return self.saturation.room(self._held[entry.id].ask.request, now)

        for _ in range(_AT_ONCE):
            entry = queue.pop(now, fits)
            if entry is None:
                return
            self._go(self._held.pop(entry.id), now)
        self.look()  # others have their turn first

    def _go(self, held: _Held, now: float) -> None:
        ask, entry = held.ask, held.entry
        if held.answer.cancelled():  # its client has just left, and it has not heard of that yet
            self._over(held, Ending.LEFT, now)
            return
        held_ms = max(0.0, now - entry.arrived_at) * 1000.0
        try:
            ask.request.admission = Admitted(held_ms, entry.priority)
            if held_ms and ask.mark is not None:
                ask.mark("hold")
            held.answer.set_result(self._schedule(ask))
        except Exception as error:
            held.answer.set_exception(error)
        self._tell(ask, Ending.ADMITTED if held_ms else Ending.PASSED, held_ms, entry.priority)

    def _refuse(self, entry: Waiting, ending: Ending, retry_s: float | None, now: float) -> None:
        held = self._held.pop(entry.id)
        if held.answer.cancelled():
            self._over(held, Ending.LEFT, now)
            return
        why = "held_too_long" if ending is Ending.EXPIRED else "overloaded"
        held.answer.set_exception(RefusedError(overloaded(self._seconds(retry_s), why)))
        self._over(held, ending, now)

    def _over(self, held: _Held, ending: Ending, now: float) -> None:
        """A request waits no longer and is not served."""
        ask, entry = held.ask, held.entry
        held_ms = max(0.0, now - entry.arrived_at) * 1000.0
        ask.request.admission = Admitted(held_ms, entry.priority)
        if ask.mark is not None:
            ask.mark("hold")
        self._tell(ask, ending, held_ms, entry.priority)

    def _retry_s(self, queue: AdmissionQueue, entry: Waiting, now: float) -> float | None:
        return queue.wait_s(entry.tenant, entry.priority, entry.weight, now)

    def _seconds(self, wait_s: float | None) -> int:
        """Retry-After: whole seconds. Where nothing is known, what a request may wait at most."""
        wait_s = self.settings.max_wait_s if wait_s is None else wait_s
        return max(1, min(_MOST_RETRY_S, math.ceil(wait_s)))

    def _arm(self) -> None:
        """Look again before long, as long as anyone waits: however many come meanwhile."""
        if self._held and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        self._timer = None
        self._look()

    def _tell(self, ask: Ask, ending: Ending, held_ms: float, priority: int) -> None:
        try:
            self.on_wait(Wait(ask.request, ending, held_ms, priority))
        except Exception:
            self._fault()

    def _release_all(self) -> None:
        """Nobody waits any more: everyone is scheduled as if nothing were held."""
        held, self._held = list(self._held.values()), {}
        self._queues = {}
        now = self._clock()
        for one in held:
            self._go(one, now)

    def _release_lost(self, now: float) -> None:
        """Those that have left their queue without an answer would wait for ever: they go."""
        for number, held in tuple(self._held.items()):
            if number not in self._queues[held.ask.request.pool]:
                self._go(self._held.pop(number), now)

    def _fault(self) -> None:
        """Say it the first time; a fault that repeats with every request would flood the log."""
        self.faults += 1
        if self.faults == 1:
            _log.exception("requests could not be held; they go on at once")
