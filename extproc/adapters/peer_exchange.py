"""The exchange with all other replicas: who they are, links to each, what they tell, what they are told.

Peers are found by address: fixed ones, those of a DNS name, and the processes of one `serve`. An address may
be our own (a headless Service names every pod): it is recognised by the name it tells, and left alone but for
a look every `_AGAIN_S`: addresses are given away again. No decision waits for anything here.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

from extproc.adapters.assembled import Assembled
from extproc.adapters.deferred import Deferred
from extproc.adapters.discovery import Discovery, Source
from extproc.adapters.peer_codec import Signal
from extproc.adapters.peer_forwarding import ForwardingService
from extproc.adapters.peer_link import LinkCounters, PeerLink, cancelled
from extproc.adapters.peer_security import PeerSecurity
from extproc.adapters.peer_server import PeerServer, PeerService, start_peer_server
from extproc.adapters.peer_status import PeersStatus, PeerStatus
from extproc.adapters.routing import RoutingService
from extproc.core.peer_loads import MAX_REPLICAS, PeerNews
from extproc.core.peer_teller import LoadTeller
from extproc.core.router import Router
from extproc.core.types import Member

MAX_PEERS = MAX_REPLICAS
_AGAIN_S = 15.0


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """How to exchange.

    Attributes:
        name: ours; another one in every replica that runs, the same after a restart.
        epoch: of this start; higher than any earlier one of the same name.
        owner: begins our tickets; another one for every start.
        listen: addresses where others reach us.
        fixed: addresses of peers that are always there.
        interval_s: how often what has changed is told.
        security: of all connections.
    """

    name: str
    epoch: int
    owner: str
    listen: tuple[str, ...]
    fixed: tuple[str, ...] = ()
    interval_s: float = 0.05
    security: PeerSecurity = PeerSecurity()  # noqa: RUF009 - frozen


@dataclass(slots=True)
class _Linked:
    """An address that is followed.

    Attributes:
        link: to it.
        told: whether it was reported as connected.
        namesake: it told our own name last: it is no peer.
        warned: that was reported, too.
        again_at: when to see who answers there now.
    """

    link: PeerLink
    told: bool = False
    namesake: bool = False
    warned: bool = False
    again_at: float = math.inf


class PeerExchange(Assembled):
    """Runs while it is entered. An async context manager.

    Args:
        settings: see there.
        router: told what peers tell; gets its `teller` here.
        service: takes news about our own requests.
        sources: where addresses of peers are learned, besides the fixed ones.
        index: pieces of what we know of the engines' caches.
        clock: seconds, monotonic.
        report: told, in one line, what an operator should know.
        later: puts off what peers tell of requests that have ended; None: it is taken at once.

    Attributes:
        forwarding: what the gRPC services must be given instead of `service`.
    """

    def __init__(
        self,
        settings: PeerSettings,
        *,
        router: Router,
        service: RoutingService,
        sources: Sequence[Source],
        index: Callable[[], AsyncGenerator[bytes, None]],
        clock: Callable[[], float],
        report: Callable[[str], None],
        later: Deferred | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self._router = router
        self._service = service
        self._clock = clock
        self._report = report
        self._links: dict[str, _Linked] = {}
        self._running: dict[PeerLink, asyncio.Task[None]] = {}  # until they have ended
        self._ending: dict[PeerLink, asyncio.Task[None]] = {}  # those that see to it
        self._past = LinkCounters()  # of links that have ended
        self._streams = 0
        self.server: PeerServer | None = None
        self.forwarding = ForwardingService(
            service, settings.owner, self._send, self._send_all, self._on_access_log, later
        )
        self._discovery = Discovery(sources, on_members=self._on_members, on_error=report)
        router.teller = LoadTeller(settings.name, settings.epoch)
        self.serves = PeerService(
            lambda: router.tell(clock()),
            owner=settings.owner,
            access_log_open=lambda: self._streams > 0,
            take=self.forwarding.take,
            index=index,
            security=settings.security,
            interval_s=settings.interval_s,
            clock=clock,
        )

    async def _start(self) -> None:
        self.server = await start_peer_server(self.settings.listen, self.serves, self.settings.security)
        self._cleanup.push_async_callback(self.server.stop)
        self._cleanup.push_async_callback(self._unlink_all)
        self._follow(self.settings.fixed)
        await self._cleanup.enter_async_context(self._discovery)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of peers, as far as they are known; our own is not among them."""
        return tuple(link.address for link in self.links)

    @property
    def links(self) -> tuple[PeerLink, ...]:
        """To all peers."""
        return tuple(linked.link for linked in self._links.values() if not linked.namesake)

    @property
    def access_log_streams(self) -> int:
        """Of Envoy's, that reach us or a peer that is heard, which hands on what is ours."""
        return self._streams + sum(link.connected and link.access_log_open for link in self.links)

    def status(self) -> PeersStatus:
        """All peers, for people and dashboards."""
        heard = {one.name: one for one in self._router.peers.heard(self._clock())}
        forwarding, serves, links = self.forwarding.counters, self.serves.counters, self._counted()
        peers = []
        for link in self.links:
            one = heard.get(link.replica)
            peers.append(
                PeerStatus(
                    link.address,
                    link.replica,
                    link.connected,
                    None if one is None else one.silent_s,
                    0.0 if one is None else one.weight,
                    0 if one is None else one.sequences,
                    link.waiting,
                    link.error,
                    link.counters.connects,
                )
            )
        return PeersStatus(
            self.settings.name,
            tuple(peers),
            forwarded=forwarding.forwarded,
            taken=forwarding.taken,
            unknown=forwarding.unknown,
            dropped=links.dropped,
            listeners=serves.listeners,
            indexes=serves.indexes,
            refused={
                "call": serves.refused,
                "update": links.refused,
                "signal": serves.implausible,
                "replica": self._router.peers.refused,
                "block": self._router.peer_prefixes.left_out,
            },
        )

    def tick(self) -> None:
        """Say it once when a peer is lost, and once when it is back; see whom access logs reach.

        And who answers by now where we found ourselves.
        """
        now = self._clock()
        for address, linked in self._links.items():
            link = linked.link
            if linked.again_at <= now:
                linked.link, linked.again_at = self._link(address), math.inf
            elif not linked.namesake and link.connected != linked.told:
                linked.told = link.connected
                if link.connected:
                    self._report(f"peer {link.replica} at {link.address}: load is exchanged")
                else:
                    self._report(
                        f"peer {link.replica} at {link.address} is lost ({link.error}): we go on alone"
                    )
        self._tell_access_log()

    # --- inside ------------------------------------------------------------------------------------

    def _on_members(self, members: tuple[Member, ...]) -> None:
        self._follow((*self.settings.fixed, *(member.endpoint for member in members)))

    def _follow(self, addresses: Iterable[str]) -> None:
        wanted = list(dict.fromkeys(addresses))
        if len(wanted) > MAX_PEERS:
            self._report(f"peers: {len(wanted)} addresses were found; the first {MAX_PEERS} are used")
            del wanted[MAX_PEERS:]
        for address in [address for address in self._links if address not in wanted]:
            self._end(self._links.pop(address).link)
        for address in wanted:
            if address not in self._links:
                self._links[address] = _Linked(self._link(address))

    def _link(self, address: str) -> PeerLink:
        link = PeerLink(
            address,
            name=self.settings.name,
            security=self.settings.security,
            take=self._take,
            clock=self._clock,
        )
        self._running[link] = asyncio.create_task(link.run(), name=f"peer {address}")
        return link

    def _end(self, link: PeerLink) -> None:
        """It is of no use any more; what it has not delivered is lost."""
        if link in self._running and link not in self._ending:
            ending = self._until_ended(link)
            self._ending[link] = asyncio.create_task(ending, name=f"peer {link.address} ends")

    async def _until_ended(self, link: PeerLink) -> None:
        await cancelled([self._running[link]])
        link.counters.dropped += link.waiting
        self._past.add(link.counters)
        del self._running[link], self._ending[link]

    def _counted(self) -> LinkCounters:
        """By all links there have been."""
        total = LinkCounters()
        for counters in (self._past, *(link.counters for link in self._running)):
            total.add(counters)
        return total

    def _take(self, link: PeerLink, news: PeerNews) -> None:
        linked = self._links.get(link.address)
        if linked is None or linked.link is not link:
            return  # it is ending
        if news.replica == self.settings.name:
            self._meet_namesake(linked, news)
            return
        linked.namesake = linked.warned = False
        self._router.on_peer_news(news, self._clock())
        self._tell_access_log()

    def _meet_namesake(self, linked: _Linked, news: PeerNews) -> None:
        """Ourselves, most likely; or somebody who was given the same name."""
        link, linked.namesake, linked.told = linked.link, True, False
        if news.epoch == self.settings.epoch and link.owner == self.settings.owner:
            linked.again_at = self._clock() + _AGAIN_S
            self._end(link)
        elif not linked.warned:
            linked.warned = True
            self._report(
                f"peer at {link.address} has our own name {news.replica!r}, so its load is not counted: "
                "give every replica a `peers.name` of its own"
            )

    def _send(self, owner: str, signal: Signal) -> bool:
        """A replica may be reached at several addresses: at one where it is heard, if there is any."""
        to_it = [link for link in self.links if link.owner == owner]
        if not to_it:
            return False
        max(to_it, key=lambda link: link.connected).send(signal)
        return True

    def _send_all(self, signal: Signal) -> None:
        for link in self.links:
            if link.connected:
                link.send(signal)

    def _on_access_log(self, streams: int) -> None:
        self._streams = streams
        self._tell_access_log()

    def _tell_access_log(self) -> None:
        """For our leases a stream to a peer that is heard is as good as one to us: it hands entries on."""
        self._service.access_log_streams(self.access_log_streams)

    async def _unlink_all(self) -> None:
        self._links.clear()
        for link in tuple(self._running):
            self._end(link)
        if self._ending:
            await asyncio.wait(tuple(self._ending.values()))
