r"""Kubernetes EndpointSlices: a list, then a watch, to the endpoints behind one Service. No I/O.

Theory of operation
===================

The API server is asked for the whole list, which carries a *resource version*, then for every change after
that version. A watch may end at any time, and is taken up again after the last version seen; bookmarks are
events that only move this version on, so that a quiet watch does not fall behind. When the server no longer
has the history (410 Gone, as the answer or as an event), what was missed cannot be known, deletions included:
everything is listed anew, and the new list *replaces* the old one. Until it is there, the old one stays.
That is done, too, where errors come again and again (`again`).

    state \\ event   listed      change     bookmark   410 Gone    other error, or the watch ends
    LISTING         -> WATCHING -          -          LISTING     LISTING
    WATCHING        -> WATCHING WATCHING   WATCHING   -> LISTING  WATCHING (again, after the last version)

Which endpoints count:

- `ready` must not be false (null means unknown, and counts) and `terminating` must not be true: a pod that is
  shutting down gets no new requests, and finishes those it has;
- of a Service with two address families, IPv4 is used, as for DNS names; FQDN slices name no addresses;
- only the first address of an endpoint, as Kubernetes prescribes; one that several slices have counts once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from extproc.core.errors import ProtocolError
from extproc.protocol.addresses import Address, canonical_host

GONE = 410
SERVICE_LABEL = "kubernetes.io/service-name"


class WatchState(Enum):
    """Where a watch stands."""

    LISTING = auto()  # nothing is known, or what is known may have missed something
    WATCHING = auto()  # what is known is complete up to `version`


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error in the stream of events: a Status object."""

    code: int
    message: str


class SliceWatch:
    """The EndpointSlices of one Service, as last known. See the module's docstring."""

    def __init__(self) -> None:
        self.state = WatchState.LISTING
        self.version: str | None = None
        self._slices: dict[str, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._slices)

    def listed(self, items: Iterable[Any], version: str) -> None:
        """The whole list, as of `version`.

        Raises:
            ProtocolError: an item is no EndpointSlice. Nothing has changed then.
        """
        fresh = {_name(item): item for item in items}
        for item in fresh.values():
            _check(item)
        self._slices, self.version, self.state = fresh, version, WatchState.WATCHING

    def event(self, event: Any) -> ApiError | None:
        """One event of the watch: `{"type": …, "object": …}`. An error is returned.

        Raises:
            ProtocolError: this is no event of a watch on EndpointSlices. List again.
        """
        if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
            raise ProtocolError(f"not a watch event: {str(event)[:200]}")
        kind, item = event.get("type"), event["object"]
        match kind:
            case "ADDED" | "MODIFIED":
                _check(item)
                self._slices[_name(item)] = item
            case "DELETED":
                self._slices.pop(_name(item), None)
            case "BOOKMARK":
                pass
            case "ERROR":
                code = item.get("code")
                error = ApiError(code if isinstance(code, int) else 0, str(item.get("message", item)))
                self.failed(error.code)
                return error
            case _:
                raise ProtocolError(f"unknown watch event {kind!r}")
        version = _mapping(item, "metadata").get("resourceVersion")
        if isinstance(version, str) and version:
            self.version = version
        return None

    def failed(self, code: int) -> None:
        """A list or watch ended with this status. Only a 410 costs us what we know of the history."""
        if code == GONE:
            self.state, self.version = WatchState.LISTING, None

    def again(self) -> None:
        """List again, whatever is known."""
        self.failed(GONE)

    def endpoints(self, port: int | str | None) -> tuple[str, ...]:
        """Endpoints (`ip:port`) that may get requests, in numeric order of the slices' own order.

        `port`: a number; the name of a port of the Service; or None for its only port.

        Raises:
            ProtocolError: the Service has no such port, or several and none was named.
        """
        families = {item.get("addressType") for item in self._slices.values()}
        family = "IPv4" if "IPv4" in families else "IPv6"
        found: dict[str, None] = {}
        for name in sorted(self._slices):
            item = self._slices[name]
            ready = [host for entry in _list(item, "endpoints") if (host := _usable(entry)) is not None]
            if item.get("addressType") != family or not ready:
                continue
            number = port if isinstance(port, int) else _port(_list(item, "ports"), port)
            found |= dict.fromkeys(str(Address(host, number)) for host in ready)
        return tuple(found)


def _usable(endpoint: Any) -> str | None:
    """The address of an endpoint that may get requests."""
    conditions = _mapping(endpoint, "conditions")
    addresses = _list(endpoint, "addresses")
    if conditions.get("ready") is False or conditions.get("terminating") is True or not addresses:
        return None
    return canonical_host(str(addresses[0]))


def _port(ports: Sequence[Any], name: str | None) -> int:
    known = [port for port in ports if isinstance(port, dict) and isinstance(port.get("port"), int)]
    fit = known if name is None else [port for port in known if port.get("name") == name]
    if len(fit) == 1:
        return int(fit[0]["port"])
    names = ", ".join(f"{port.get('name') or '(no name)'} {port['port']}" for port in known) or "none"
    if name is None:
        raise ProtocolError(f"the Service has {len(known)} ports ({names}): name one as `port`")
    raise ProtocolError(f"the Service has no port {name!r}; it has {names}")


def _name(item: Any) -> str:
    name = _mapping(item, "metadata").get("name")
    if not isinstance(name, str) or not name:
        raise ProtocolError(f"an EndpointSlice without a name: {str(item)[:200]}")
    return name


def _check(item: Any) -> None:
    """Refuse what `endpoints` could not read."""
    for endpoint in _list(item, "endpoints"):
        _mapping(endpoint, "conditions")
        _list(endpoint, "addresses")
    _list(item, "ports")


def _mapping(item: Any, key: str) -> Mapping[str, Any]:
    value = item.get(key) if isinstance(item, dict) else item
    if value is None and isinstance(item, dict):
        return {}
    if not isinstance(value, dict):
        raise ProtocolError(f"{key} of an EndpointSlice must be a mapping, got {str(value)[:200]}")
    return value


def _list(item: Any, key: str) -> Sequence[Any]:
    value = item.get(key) if isinstance(item, dict) else item
    if value is None and isinstance(item, dict):
        return ()
    if not isinstance(value, list):
        raise ProtocolError(f"{key} of an EndpointSlice must be a list, got {str(value)[:200]}")
    return value
