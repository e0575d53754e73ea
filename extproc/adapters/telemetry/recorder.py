"""The one object through which the rest of the service is observed. No fault in here reaches a request."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry

from extproc.adapters.deferred import Deferred, Work
from extproc.adapters.holding import Wait
from extproc.adapters.routing import HttpRequest
from extproc.adapters.telemetry.labels import ServedModels
from extproc.adapters.telemetry.registry import MetricsPage, metrics_page, new_registry
from extproc.adapters.telemetry.request_metrics import RequestMetrics
from extproc.adapters.telemetry.spans import Spans
from extproc.adapters.telemetry.stages import Stages
from extproc.adapters.telemetry.state_metrics import StateCollector, StateSources
from extproc.core.kv_lifetimes import BlockLifetimes
from extproc.core.outcomes import Released
from extproc.core.rollout import Mode
from extproc.core.types import Decision, KvEvent, WorkerId
from extproc.protocol.rejections import Reject

_log = logging.getLogger("warmroute.telemetry")

_NO_HEADERS: Mapping[str, str] = {}


class Telemetry:
    """Metrics always, spans where there is a tracer. All methods are quick, and called on the event loop.

    Args:
        clock: monotonic seconds.
        is_base_model: whether a pool is known to serve a model of this name.
        spans: where spans go; None: nowhere.
        later: puts off what need not be done before a request goes on; None: everything is done at once.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        is_base_model: Callable[[str], bool] = lambda _name: False,
        spans: Spans | None = None,
        later: Deferred | None = None,
    ) -> None:
        self._clock = clock
        self._spans = spans
        self._later = later
        self._lifetimes = BlockLifetimes()
        self._state: StateCollector | None = None
        self.faults = 0
        self.registry: CollectorRegistry = new_registry()
        self.metrics = RequestMetrics(self.registry, ServedModels(is_base_model))

    def watch(self, sources: StateSources) -> None:
        """Expose the state of these, too."""
        self._state = StateCollector(sources)
        self.registry.register(self._state)

    def page(self, accept: str = "") -> MetricsPage:
        """What `/metrics` answers to a request with this Accept header: all that has happened by now."""
        if self._later is not None:
            self._later.flush()
        return metrics_page(self.registry, accept)

    # --- requests ----------------------------------------------------------------------------------

    def begin(self) -> Stages:
        """A request has come; its stages are marked in what is returned."""
        return Stages(self._clock)

    def decided(self, http: HttpRequest, decision: Decision, stages: Stages) -> Mapping[str, str]:
        """It was routed. Returns headers to send along with it."""
        self._do(partial(self._count, decision, stages))
        if self._spans is None:
            return _NO_HEADERS
        try:
            return self._spans.decided(http, decision, stages)
        except Exception:
            self._fault("a decision")
            return _NO_HEADERS

    def rejected(self, http: HttpRequest, reject: Reject, stages: Stages) -> None:
        """It was refused."""
        try:
            self.metrics.rejected(reject.why)
            if self._spans is not None:
                self._spans.rejected(http, reject, stages)
        except Exception:
            self._fault("a refusal")

    def finished(self, released: Released) -> None:
        """It has ended."""
        self._do(partial(self._finished, released, time.time_ns()))

    def waited(self, wait: Wait) -> None:
        """A request that may be held was not, or no longer is."""
        try:
            request = wait.request
            self.metrics.waited(request.pool, request.tenant, wait.ending.value, wait.held_ms / 1000.0)
        except Exception:
            self._fault("a wait")

    # --- KV events ---------------------------------------------------------------------------------

    def kv_events(self, worker: WorkerId, pool: str, events: Sequence[KvEvent]) -> None:
        """A worker of `pool` told what it stored and removed."""
        try:
            self.metrics.evicted(pool, self._lifetimes.apply(worker, events, self._clock()))
        except Exception:
            self._fault("KV events")

    def kv_forgotten(self, worker: WorkerId) -> None:
        """What the worker told before no longer holds, or it has left."""
        self._lifetimes.forget(worker)

    def _do(self, work: Work) -> None:
        if self._later is None:
            work()
        else:
            self._later.add(work)

    def _count(self, decision: Decision, stages: Stages) -> None:
        try:
            self.metrics.decided(decision, stages)
            if self._state is not None and decision.request.mode is not Mode.OBSERVE:
                self._state.count_routed(decision.chosen.worker)
        except Exception:
            self._fault("a decision")

    def _finished(self, released: Released, now_ns: int) -> None:
        try:
            trace_id = None if self._spans is None else self._spans.finished(released, now_ns)
            self.metrics.finished(released, trace_id)
        except Exception:
            self._fault("the end of a request")

    def _fault(self, what: str) -> None:
        """Say it the first time; a fault that repeats with every request would flood the log."""
        self.faults += 1
        if self.faults == 1:
            _log.exception("%s could not be recorded; requests are not affected", what)
