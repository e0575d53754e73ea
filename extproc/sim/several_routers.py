"""Several routers in front of one simulated fleet, each with its share of the requests.

Each request goes to one of them by chance, as behind a balancer. That one hears how it goes on; KV events and
metrics reach all. Ours exchange load as they do in production (see `extproc.core.peer_loads`): each tells the
others every `exchange_s` what has changed, and everything once a second; a message takes `TRAVEL_S`.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from random import Random

from extproc.core.peer_loads import PeerNews
from extproc.core.peer_teller import LoadTeller
from extproc.core.types import EngineMetrics, KvEvent
from extproc.sim.hosted_router import HostedRouter
from extproc.sim.routing import FleetFacts, FleetRouter, HoldsRequests, RouterMaker, SimRequest

TRAVEL_S = 0.001
SNAPSHOT_S = 1.0


class SeveralRouters:
    """A `FleetRouter` made of several.

    Args:
        make: of each of them.
        count: how many.
        exchange_s: how often each tells the others what it has sent where; None: never.
        facts: the fleet.
        seed: of who gets a request, and of the routers.
    """

    def __init__(
        self, make: RouterMaker, count: int, exchange_s: float | None, facts: FleetFacts, seed: int
    ) -> None:
        self._routers: list[FleetRouter] = [make(facts, seed + number) for number in range(count)]
        self.name = f"{self._routers[0].name} x{count}"
        self.wants_kv_events = getattr(self._routers[0], "wants_kv_events", True)
        self.scrape_interval_s = getattr(self._routers[0], "scrape_interval_s", facts.scrape_interval_s)
        self._chance = Random(seed ^ 0x5E7E)  # noqa: S311 - a simulation
        self._owners: dict[str, FleetRouter] = {}
        self._exchange_s = exchange_s
        self._ours = [router for router in self._routers if isinstance(router, HostedRouter)]
        self._heard = [0] * len(self._ours)
        self._next_exchange = 0.0 if exchange_s is None else exchange_s
        self._next_snapshot = SNAPSHOT_S
        self._travelling: deque[tuple[float, int, PeerNews]] = deque()
        if exchange_s is not None:
            for number, router in enumerate(self._ours):
                router.router.teller = LoadTeller(f"router-{number}", 1)

    def route(self, request: SimRequest, now: float) -> int:
        """See `FleetRouter`."""
        self._exchange(now)
        router = self._routers[self._chance.randrange(len(self._routers))]
        self._owners[request.request_id] = router
        return router.route(request, now)

    def released(self, now: float) -> list[tuple[str, int | None]]:
        """See `HoldsRequests`; nothing where none of them holds anything."""
        self._exchange(now)
        released: list[tuple[str, int | None]] = []
        for router in self._routers:
            if isinstance(router, HoldsRequests):
                released += router.released(now)
        for request_id, worker in released:
            if worker is None:
                del self._owners[request_id]
        return released

    def on_first_token(self, request_id: str, now: float) -> None:
        """See `FleetRouter`."""
        self._exchange(now)
        self._owners[request_id].on_first_token(request_id, now)

    def on_finished(
        self, request_id: str, cached_tokens: int | None, output_tokens: int | None, now: float
    ) -> None:
        """See `FleetRouter`."""
        self._exchange(now)
        self._owners.pop(request_id).on_finished(request_id, cached_tokens, output_tokens, now)

    def on_kv_events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """See `FleetRouter`."""
        self._exchange(now)
        for router in self._routers:
            router.on_kv_events(worker, events, now)

    def on_kv_gap(self, worker: int, now: float) -> None:
        """See `FleetRouter`."""
        for router in self._routers:
            router.on_kv_gap(worker, now)

    def on_metrics(self, worker: int, metrics: EngineMetrics, now: float) -> None:
        """See `FleetRouter`."""
        self._exchange(now)
        for router in self._routers:
            router.on_metrics(worker, metrics, now)

    def close(self) -> None:
        """Stop what each of them hosts."""
        for router in self._routers:
            stop = getattr(router, "close", None)
            if stop is not None:
                stop()

    def _exchange(self, now: float) -> None:
        """Make up for what has been told since the last call, at the times it was told."""
        while self._exchange_s is not None and self._next_exchange <= now:
            at, self._next_exchange = self._next_exchange, self._next_exchange + self._exchange_s
            self._deliver(at)
            whole = at >= self._next_snapshot
            if whole:
                self._next_snapshot = at + SNAPSHOT_S
            for number, router in enumerate(self._ours):
                teller = router.router.tell(at)
                news = [teller.since(self._heard[number])] + ([teller.snapshot()] if whole else [])
                self._heard[number] = teller.number
                self._travelling.extend((at + TRAVEL_S, number, one) for one in news)
        self._deliver(now)

    def _deliver(self, now: float) -> None:
        while self._travelling and self._travelling[0][0] <= now:
            at, teller, news = self._travelling.popleft()
            for number, router in enumerate(self._ours):
                if number != teller:
                    router.router.on_peer_news(news, at)


def several(make: RouterMaker, count: int, exchange_s: float | None) -> RouterMaker:
    """`make` itself for one router; else the maker of several."""
    return make if count == 1 else partial(SeveralRouters, make, count, exchange_s)
