"""Who the workers are: static lists, a watched file, DNS names, and any mix of them.

A source publishes its whole list whenever it has worked it out; `Discovery` merges the lists (the first
source that names an endpoint describes it) and tells its caller only of changes. What goes wrong is
reported, and the last good list stays in force: losing a source of information loses no worker.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from extproc.adapters.name_resolution import NamedMembers, Publish, Report, ResolutionSettings, Resolve
from extproc.adapters.name_resolution import system_resolver as _system_resolver
from extproc.core.errors import ProtocolError
from extproc.core.types import Member
from extproc.protocol.addresses import parse_address
from extproc.protocol.members_file import parse_members

_LOG = logging.getLogger(__name__)

OnMembers = Callable[[tuple[Member, ...]], None]
OnError = Callable[[str], None]

MAX_FILE_BYTES = 16 << 20
_SETTLE_S = 0.02


class Source(Protocol):
    """One place to learn members from."""

    async def start(self, publish: Publish, report: Report) -> None:
        """Begin; `publish` takes the source's whole list each time, `report` what went wrong."""

    async def close(self) -> None:
        """Stop; nothing is published after this."""


class Discovery:
    """The union of several sources.

    Args:
        sources: in order of precedence.
        on_members: takes the merged members, on change only: in source order, one per endpoint.
        on_error: takes what went wrong with a source, once per cause.
    """

    def __init__(self, sources: Sequence[Source], *, on_members: OnMembers, on_error: OnError) -> None:
        self._sources = tuple(sources)
        self._on_members = on_members
        self._on_error = on_error
        self._lists: list[tuple[Member, ...] | None] = [None] * len(self._sources)
        self._members: tuple[Member, ...] | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """The merged members as last told."""
        return self._members or ()

    @property
    def complete(self) -> bool:
        """Whether every source has published a list: before that, members may be missing."""
        return all(one is not None for one in self._lists)

    async def start(self) -> None:
        """Start every source."""
        for number, source in enumerate(self._sources):
            await source.start(self._taker(number), self._on_error)

    async def close(self) -> None:
        """Stop every source."""
        for source in self._sources:
            await source.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _taker(self, number: int) -> Publish:
        def take(members: tuple[Member, ...]) -> None:
            self._lists[number] = members
            merged: dict[str, Member] = {}
            for one in self._lists:
                for member in one or ():
                    merged.setdefault(member.endpoint, member)
            now = tuple(merged.values())
            if now == self._members:
                return
            self._members = now
            try:
                self._on_members(now)
            except Exception:
                _LOG.exception("taking %d members failed: a bug, discovery goes on", len(now))

        return take


class StaticDiscovery:
    """Members from the configuration. Hosts that are names are resolved, and again each interval.

    Raises:
        AddressError: on construction, if an endpoint is not `host:port`.
    """

    def __init__(
        self,
        members: Iterable[Member],
        settings: ResolutionSettings | None = None,
        resolve: Resolve = _system_resolver,
    ) -> None:
        self._entries = tuple(members)
        for member in self._entries:
            parse_address(member.endpoint)
        self._settings = settings
        self._resolve = resolve
        self._named: NamedMembers | None = None

    async def start(self, publish: Publish, report: Report) -> None:
        """Publish at once, or after the first lookup if there are names."""
        self._named = NamedMembers(publish, report, self._settings, self._resolve)
        self._named.set(self._entries)

    async def close(self) -> None:
        """Stop looking names up."""
        if self._named is not None:
            await self._named.close()


class DnsDiscovery(StaticDiscovery):
    """Every address of one name is a member, described by `template` (its endpoint is ignored)."""

    def __init__(
        self,
        name: str,
        port: int,
        template: Member,
        settings: ResolutionSettings | None = None,
        resolve: Resolve = _system_resolver,
    ) -> None:
        fields = {
            field: getattr(template, field)
            for field in ("pool", "dp_size", "dp_start_rank", "kv_events", "kv_replay", "kv_bind")
        }
        super().__init__([Member(endpoint=f"{name}:{port}", **fields)], settings, resolve)


class FileDiscovery:
    """Members from a file (see `protocol.members_file` for its forms), read again every `interval_s`.

    Looking at the content finds every kind of change: rewriting in place, renaming over it, a symbolic link
    that points elsewhere. New content counts once two looks in a row saw the same, so that a file that is
    just being written is not read half. A file that is broken, or gone, leaves the last good list in force.

    Args:
        path: the file.
        template: gives what the file does not say.
        cluster: only this load assignment of an Envoy file; None takes all.
        interval_s: time between looks, at most a second.
        settings: for hosts that are names.
        resolve: the lookup for them.
    """

    def __init__(
        self,
        path: Path | str,
        template: Member,
        *,
        cluster: str | None = None,
        interval_s: float = 0.5,
        settings: ResolutionSettings | None = None,
        resolve: Resolve = _system_resolver,
    ) -> None:
        self._path = Path(path)
        self._template = template
        self._cluster = cluster
        self._interval_s = min(interval_s, 1.0)
        self._settings = settings
        self._resolve = resolve
        self._seen: bytes | None = None
        self._error: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._named: NamedMembers | None = None

    async def start(self, publish: Publish, report: Report) -> None:
        """Read the file once, then watch it."""
        self._named = NamedMembers(publish, report, self._settings, self._resolve)
        await self._look(self._named, report)
        self._task = asyncio.create_task(self._watch(self._named, report), name=f"watch {self._path}")

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self._named is not None:
            await self._named.close()

    async def _watch(self, named: NamedMembers, report: Report) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._look(named, report)

    async def _look(self, named: NamedMembers, report: Report) -> None:
        content: bytes | None = None
        try:
            content = await self._settled()
            if content == self._seen:
                return
            self._seen = content
            # Not on the event loop: the list of a large fleet takes a good part of a second.
            members = await asyncio.to_thread(self._parsed, content)
        except (OSError, UnicodeDecodeError, ProtocolError) as error:
            if content is None:
                self._seen = None  # what is there next is news, and be it what was there before
            cause = (isinstance(error, OSError) and error.strerror) or str(error)
            if cause != self._error:
                self._error = cause
                report(f"{self._path}: {cause}; the last good list stays")
            return
        self._error = None
        named.set(members)

    def _parsed(self, content: bytes) -> tuple[Member, ...]:
        return parse_members(content.decode("utf-8"), self._template, self._cluster)

    async def _settled(self) -> bytes:
        content = await asyncio.to_thread(self._read)
        while content != self._seen:
            await asyncio.sleep(_SETTLE_S)
            again = await asyncio.to_thread(self._read)
            if again == content:
                break
            content = again
        return content

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ProtocolError(f"larger than {MAX_FILE_BYTES} bytes")
        return content
