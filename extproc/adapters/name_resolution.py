"""Members whose hosts may be names, to members whose hosts are addresses.

Envoy matches resolved addresses only, so a name must never reach a decision. Every name is looked up again
each interval. Policies:

- a failed lookup keeps what the name meant before, and is reported once per cause;
- an empty answer counts as a failure too, because a broken DNS server and a fleet scaled to nothing look
  the same; `empty_is_failure=False` believes it (damped like any absence);
- an address leaves after `drop_after` answers in a row without it.
"""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from extproc.core.types import Member
from extproc.protocol.address_memory import AddressMemory
from extproc.protocol.addresses import Address, parse_address

Resolve = Callable[[str], Awaitable[Iterable[str]]]
Publish = Callable[[tuple[Member, ...]], None]
Report = Callable[[str], None]

_ABSENT = {
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY") if hasattr(socket, name)
}


@dataclass(frozen=True, slots=True)
class ResolutionSettings:
    """How names are resolved. Times in seconds; see the module for the policies."""

    interval_s: float = 5.0
    timeout_s: float = 5.0
    drop_after: int = 3
    empty_is_failure: bool = True


async def system_resolver(name: str) -> list[str]:
    """Addresses of a name by the system's resolver, in a thread. A name that does not exist is empty.

    Raises:
        OSError: the lookup failed.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _ABSENT:
            return []
        raise
    # A zone (`%eth0`) has no meaning to Envoy.
    return [str(where[0]).partition("%")[0] for *_, where in found]


def at_address(member: Member, ip: str) -> Member:
    """`member` at an address.

    The host `*`, or none, of its KV endpoints becomes that address, unless the engine dials us.
    """
    _, port = parse_address(member.endpoint)
    host = f"[{ip}]" if ":" in ip else ip

    def own(endpoint: str | None) -> str | None:
        if endpoint is None or member.kv_bind:
            return endpoint
        return endpoint.replace("//*:", f"//{host}:", 1).replace("//:", f"//{host}:", 1)

    return dataclasses.replace(
        member,
        endpoint=str(Address(ip, port)),
        kv_events=own(member.kv_events),
        kv_replay=own(member.kv_replay),
    )


class NamedMembers:
    """Keeps a list of members resolved, and publishes it whenever it is worked out anew.

    Args:
        publish: takes the resolved members, in list order and within a name in numeric order.
        report: takes what went wrong.
        settings: intervals and policies.
        resolve: the lookup; the system's by default.
    """

    def __init__(
        self,
        publish: Publish,
        report: Report,
        settings: ResolutionSettings | None = None,
        resolve: Resolve = system_resolver,
    ) -> None:
        self._publish = publish
        self._report = report
        self._settings = settings or ResolutionSettings()
        self._resolve = resolve
        self._entries: tuple[Member, ...] = ()
        self._known: dict[str, AddressMemory] = {}
        self._pending: dict[str, asyncio.Future[Iterable[str]]] = {}
        self._errors: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def set(self, entries: Iterable[Member]) -> None:
        """Make these the members. Without names they are published at once, else after a lookup."""
        self._entries = tuple(entries)
        names = set(self._names())
        for forgotten in [name for name in self._known if name not in names]:
            del self._known[forgotten]
            self._errors.pop(forgotten, None)
        for forgotten in [name for name in self._pending if name not in names]:
            self._pending.pop(forgotten).cancel()
        if not names:
            self._publish(self._resolved())
        elif self._task is None:
            self._task = asyncio.create_task(self._run(), name="resolve worker names")
        self._changed.set()

    async def close(self) -> None:
        """Stop; nothing is published after this."""
        tasks: list[asyncio.Future[Iterable[str]] | asyncio.Task[None]] = list(self._pending.values())
        if self._task is not None:
            tasks.append(self._task)
            self._task = None
        self._pending.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _names(self) -> list[str]:
        hosts = (parse_address(member.endpoint) for member in self._entries)
        return list(dict.fromkeys(address.host for address in hosts if not address.is_resolved))

    def _resolved(self) -> tuple[Member, ...]:
        out: dict[str, Member] = {}
        for entry in self._entries:
            address = parse_address(entry.endpoint)
            if address.is_resolved:
                ips: tuple[str, ...] = (address.host,)
            else:
                memory = self._known.get(address.host)
                ips = () if memory is None else memory.addresses
            for ip in ips:
                member = at_address(entry, ip)
                out.setdefault(member.endpoint, member)
        return tuple(out.values())

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            names = self._names()
            if names:
                await asyncio.gather(*(self._look_up(name) for name in names))
                # Names that came meanwhile are looked up first, lest what they replace vanish before them.
                if names == self._names():
                    self._publish(self._resolved())
            # Not wait_for, which before Python 3.12 can lose a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.interval_s):
                    await self._changed.wait()

    async def _look_up(self, name: str) -> None:
        # A lookup cannot be interrupted in its thread: one that hangs is waited for again, not repeated.
        lookup = self._pending.pop(name, None) or asyncio.ensure_future(self._resolve(name))
        done, _ = await asyncio.wait({lookup}, timeout=self._settings.timeout_s)
        if not done:
            self._pending[name] = lookup
            self._fail(name, f"no answer within {self._settings.timeout_s:g} s")
            return
        try:
            memory = self._known.get(name) or AddressMemory(self._settings.drop_after)
            answer = list(lookup.result())
            if answer or not self._settings.empty_is_failure:
                memory.observe(answer)
                self._known[name] = memory
                self._errors.pop(name, None)
                return
            self._fail(name, "the name has no address")
        except (OSError, ValueError) as error:
            self._fail(name, str(error))

    def _fail(self, name: str, cause: str) -> None:
        if self._errors.get(name) != cause:
            self._errors[name] = cause
            self._report(f"cannot resolve {name}: {cause}; its last known addresses stay")
