"""Runs an `EngineModel` on the event loop's clock and tells each request what became of it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from extproc.core.types import KvEvent
from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineRequest, StepResult


class Generation:
    """A request on its way through the engine: how far it is. Changed only by the driver."""

    __slots__ = ("cached_tokens", "changed", "emitted", "finished", "request")

    def __init__(self, request: EngineRequest, changed: asyncio.Event) -> None:
        self.request = request
        self.emitted = 0
        self.finished = False
        self.cached_tokens: int | None = None  # known with the first token
        self.changed = changed


class EngineDriver:
    """The model's clock: it ticks whenever a step is over.

    Model time is loop time minus the time spent paused. A late timer does not shift the model: it ends every
    step at the moment the model said (see `EngineModel.tick`). `publish` gets the KV event batch of every
    step that has one, before any of its tokens is told.
    """

    def __init__(self, model: EngineModel, publish: Callable[[Sequence[KvEvent]], None]) -> None:
        self.model = model
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._generations: dict[str, Generation] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._paused_at: float | None = None
        self._paused_s = 0.0

    def submit(self, requests: Sequence[EngineRequest], changed: asyncio.Event) -> list[Generation]:
        """Queue the sequences of one HTTP request, all or none; `changed` is set at every news of any.

        Raises:
            RequestTooLongError: one of them is longer than the model takes.
        """
        now = self._now()
        accepted: list[Generation] = []
        try:
            for request in requests:
                self.model.submit(request, now)
                accepted.append(Generation(request, changed))
        except BaseException:
            for generation in accepted:
                self.model.abort(generation.request.request_id)
            raise
        self._generations.update((one.request.request_id, one) for one in accepted)
        self._arm()
        return accepted

    def abort(self, generations: Sequence[Generation]) -> None:
        """Drop whatever of these is not finished."""
        for generation in generations:
            if self._generations.pop(generation.request.request_id, None) is not None:
                self.model.abort(generation.request.request_id)

    def pause(self) -> None:
        """Stop the engine: no step ends until `resume`. Requests are still taken in."""
        if self._paused_at is None:
            self._paused_at = self._loop.time()
            self._disarm()

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        if self._paused_at is not None:
            self._paused_s += self._loop.time() - self._paused_at
            self._paused_at = None
            self._arm()

    def close(self) -> None:
        """Stop the clock for good."""
        self._disarm()

    def _now(self) -> float:
        at = self._loop.time() if self._paused_at is None else self._paused_at
        return at - self._paused_s

    def _arm(self) -> None:
        self._disarm()
        deadline = self.model.next_deadline()
        if deadline is not None and self._paused_at is None:
            self._timer = self._loop.call_at(deadline + self._paused_s, self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        # The loop runs timers up to its clock's resolution early.
        deadline = self.model.next_deadline()
        now = self._now() if deadline is None else max(self._now(), deadline)
        for result in self.model.tick(now):
            self._apply(result)
        self._arm()

    def _apply(self, result: StepResult) -> None:
        if result.events:
            self._publish(result.events)
        for first in result.first_tokens:
            generation = self._generations.get(first.request.request_id)
            if generation is not None:
                generation.cached_tokens = first.cached_tokens
        for generation in self._of(result.emitted):
            generation.emitted += 1
            generation.changed.set()
        for done in result.finished:
            generation = self._generations.pop(done.request.request_id, None)
            if generation is not None:
                generation.finished = True

    def _of(self, requests: Sequence[EngineRequest]) -> Iterator[Generation]:
        for request in requests:
            generation = self._generations.get(request.request_id)
            if generation is not None:
                yield generation
