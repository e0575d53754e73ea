"""Who asks: a tenant's name from what the gateway says about a request, never from its body.

Sources are tried in order and the first that says something wins. A header is as trustworthy as whoever
sets it: where clients could, let the gateway set or remove it, or use metadata of one of its own filters
(jwt_authn puts the claims of a verified token there) or an attribute of the connection.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from extproc.protocol.endpoint_picker import Metadata
from extproc.protocol.names import LONGEST

JWT_NAMESPACE = "envoy.filters.http.jwt_authn"
"""Where Envoy's jwt_authn filter puts the payload of a token, under its `payload_in_metadata`."""


@dataclass(frozen=True, slots=True)
class FromHeader:
    """A request header. Sent several times, its values are joined by ", ", which is a name of its own."""

    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.lower())


@dataclass(frozen=True, slots=True)
class FromMetadata:
    """Dynamic metadata of a filter of the gateway: a namespace, and the keys that lead to the name."""

    namespace: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FromAttribute:
    """An attribute the gateway sends along, such as `connection.uri_san_peer_certificate`."""

    name: str


IdentitySource: TypeAlias = FromHeader | FromMetadata | FromAttribute


def identify(
    sources: Iterable[IdentitySource],
    headers: Mapping[str, str],
    metadata: Metadata,
    attributes: Mapping[str, object],
) -> str:
    """The tenant's name; empty when no source names one. `headers` have lower-case names."""
    for source in sources:
        match source:
            case FromHeader(name):
                value: object = headers.get(name)
            case FromMetadata(namespace, path):
                value = _at(metadata.get(namespace), path)
            case FromAttribute(name):
                value = attributes.get(name)
        if name := _name(value):
            return name
    return ""


def namespaces(sources: Iterable[IdentitySource]) -> tuple[str, ...]:
    """Metadata namespaces the gateway must send."""
    found = (source.namespace for source in sources if isinstance(source, FromMetadata))
    return tuple(dict.fromkeys(found))


def attribute_names(sources: Iterable[IdentitySource]) -> tuple[str, ...]:
    """Attributes the gateway must send."""
    found = (source.name for source in sources if isinstance(source, FromAttribute))
    return tuple(dict.fromkeys(found))


def _at(value: object, path: Iterable[str]) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _name(value: object) -> str:
    """A name from what metadata can hold: text, or a whole number. Anything else names nobody.

    Nor does a text that is longer, or less printable, than a name we could be configured for.
    """
    if isinstance(value, bool):
        return ""
    if isinstance(value, int | float):
        value = str(int(value)) if value == value // 1 else ""
    if not isinstance(value, str):
        return ""
    name = value.strip()
    return name if len(name) <= LONGEST and name.isprintable() else ""
