"""Which adapters (LoRA) each worker has, and which of them are on its GPU.

An engine *registers* adapters (`/v1/models` lists them, as they are loaded and unloaded at run time) and
keeps at most `max_lora` of them in GPU *slots*; a request for one that is registered but not in a slot makes
the engine swap it in, least recently used out, and waits while every slot serves running requests. Slots are
not published, so they are followed: each request we send and each adapter the metrics call active uses one.
(Where metrics cannot tell which are active, requests we send are all there is: no worker looks full then.)

| what is known of the adapter | standing |
|---|---|
| in a slot | LOADED |
| registered, a slot is free or holds an idle adapter | LOADABLE |
| registered, every slot serves other running requests | FULL |
| what the worker registers is not known yet | UNKNOWN |
| not registered | ABSENT |

Requests go to workers that are not ABSENT, and to UNKNOWN ones only if no worker is known to have it. If
all are ABSENT the adapter is nobody's, and the engine should say so: every worker stays.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from extproc.core.types import WorkerId
from extproc.core.worker_table import WorkerState


class Standing(Enum):
    """See the module's table."""

    LOADED = auto()
    LOADABLE = auto()
    FULL = auto()
    UNKNOWN = auto()
    ABSENT = auto()


@dataclass(slots=True)
class _Slots:
    """Adapters on one worker's GPU, least recently used first."""

    used: dict[str, None] = field(default_factory=dict)
    active: frozenset[str] = frozenset()  # with requests, by the last scrape
    size: int | None = None

    def touch(self, adapter: str) -> None:
        self.used.pop(adapter, None)
        self.used[adapter] = None
        while self.size is not None and len(self.used) > self.size:
            del self.used[
                next((name for name in self.used if name not in self.active), next(iter(self.used)))
            ]


@dataclass(slots=True)
class AdapterSlots:
    """All workers. A worker that leaves is forgotten with `keep`."""

    _registered: dict[str, frozenset[str]] = field(default_factory=dict)  # by endpoint
    _slots: dict[WorkerId, _Slots] = field(default_factory=dict)

    def on_models(self, endpoint: str, adapters: Iterable[str]) -> None:
        """A server told every adapter it has registered."""
        names = frozenset(adapters)
        self._registered[endpoint] = names
        for worker, slots in self._slots.items():
            if worker.endpoint == endpoint:
                slots.used = {name: None for name in slots.used if name in names}

    def on_metrics(self, worker: WorkerId, active: Sequence[str], max_lora: int | None) -> None:
        """Adapters with requests running or waiting now, and the number of slots."""
        if not active and max_lora is None and worker not in self._slots:
            return
        slots = self._slots.setdefault(worker, _Slots())
        slots.size = max_lora
        slots.active = frozenset(active)
        for adapter in active:
            slots.touch(adapter)

    def on_use(self, worker: WorkerId, adapter: str | None) -> None:
        """A request for an adapter was sent to a worker."""
        registered = self._registered.get(worker.endpoint, frozenset())
        if adapter is not None and adapter in registered:  # anything else is a name that a client made up
            self._slots.setdefault(worker, _Slots()).touch(adapter)

    def keep(self, is_member: Callable[[str], bool]) -> None:
        """Forget endpoints that left."""
        for endpoint in [endpoint for endpoint in self._registered if not is_member(endpoint)]:
            del self._registered[endpoint]
        for worker in [worker for worker in self._slots if not is_member(worker.endpoint)]:
            del self._slots[worker]

    def standing(self, worker: WorkerId, adapter: str) -> Standing:
        """How a worker stands to an adapter."""
        registered = self._registered.get(worker.endpoint)
        slots = self._slots.get(worker)
        if registered is None:
            in_use = slots is not None and adapter in slots.used
            return Standing.LOADED if in_use else Standing.UNKNOWN
        if adapter not in registered:
            return Standing.ABSENT
        if slots is None:
            return Standing.LOADABLE
        if adapter in slots.used:
            return Standing.LOADED
        full = slots.size is not None and len(slots.active) >= slots.size
        return Standing.FULL if full else Standing.LOADABLE

    def eligible(self, states: Sequence[WorkerState], adapter: str | None) -> Sequence[WorkerState]:
        """The workers that may serve a request for `adapter`, of those that are reached, in their order."""
        if adapter is None or not self._registered:
            return states
        standings = [(state, self.standing(state.id, adapter)) for state in states]
        have = [state for state, standing in standings if standing not in (Standing.ABSENT, Standing.UNKNOWN)]
        unknown = [state for state, standing in standings if standing is Standing.UNKNOWN]
        return have or unknown or states

    def known(self, adapter: str) -> bool:
        """Whether any worker has told of an adapter; if not, its name may be one that a client made up."""
        return any(adapter in names for names in self._registered.values()) or any(
            adapter in slots.used for slots in self._slots.values()
        )

    def load_ms(self, worker: WorkerId, adapter: str | None, swap_ms: float) -> float:
        """Milliseconds before a request for `adapter` can start there, besides other waits."""
        if adapter is None:
            return 0.0
        standing = self.standing(worker, adapter)
        if standing is Standing.LOADED:
            return 0.0
        return swap_ms if standing is not Standing.FULL else swap_ms * _FULL_FACTOR


_FULL_FACTOR = 10.0  # waiting for another adapter's requests to end takes much longer than a swap
