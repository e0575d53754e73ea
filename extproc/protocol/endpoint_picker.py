"""The wire contract with the gateway: every name, and how each value is spelled.

Endpoint Picker Protocol 1.0 (Gateway API Inference Extension):

- in: metadata `envoy.lb.subset_hint` / `x-gateway-destination-endpoint-subset` may restrict the choice. It
  is a list, or one comma-separated string; blanks are skipped. Absent: all endpoints. Present but empty:
  none, which is a 503.
- out: `ip:port`, or an ordered comma-separated list whose later entries are fallbacks, as the request
  header `x-gateway-destination-endpoint` and, the same value, as metadata `envoy.lb` under the same key.
- back: metadata `envoy.lb` / `x-gateway-destination-endpoint-served` tells who really served.
- no ready endpoint: 503. Shed because of load: 429.

Ours: the lease travels as metadata `warmroute` / `ticket` and comes back in the access log.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from extproc.protocol.addresses import AddressError, canonical_host, parse_address

EXTERNAL_PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG_SERVICE = "envoy.service.accesslog.v3.AccessLogService"
HEALTH_SERVICE = "grpc.health.v1.Health"

LB_NAMESPACE = "envoy.lb"
DESTINATION = "x-gateway-destination-endpoint"
SERVED_KEY = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"
POOL_HEADER = "x-warmroute-pool"
"""Request header that names the chosen pool: Envoy's routes lead to clusters by it."""
WORKERS_HEADER = "x-warmroute-workers"
"""Request header; `named` means that no worker but the named ones may serve this, whatever happens."""
TICKET_NAMESPACE = "warmroute"
TICKET_KEY = "ticket"

NO_ENDPOINT_STATUS = 503
SHED_STATUS = 429

TEST_SELECTION_HEADER = "test-epp-endpoint-selection"
"""Request header of the conformance tests: overrides the choice. Ignored unless test mode is on."""
TEST_SERVED_HEADER = "x-conformance-test-served-endpoint"
"""Response header of the conformance tests: echoes the served endpoint. Only in test mode."""

Metadata = Mapping[str, Mapping[str, object]]
"""Namespace -> key -> value: the part of Envoy's dynamic metadata that concerns us."""

READ_NAMESPACES = (LB_NAMESPACE, SUBSET_NAMESPACE, TICKET_NAMESPACE)

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+")
_FORBIDDEN_IN_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def merge_metadata(into: dict[str, dict[str, object]], update: Metadata) -> None:
    """Add what a later message of the stream says to what the earlier ones said.

    Gateways may send metadata with the first message only, or a part of it with each: a message that says
    less than the one before takes nothing back.
    """
    for namespace, values in update.items():
        into.setdefault(namespace, {}).update(values)


def subset_hint(metadata: Metadata) -> frozenset[str] | None:
    """Endpoints the gateway restricts us to; None if it does not. Entries may lack a port."""
    values = metadata.get(SUBSET_NAMESPACE)
    if values is None or SUBSET_KEY not in values:
        return None
    hint = values[SUBSET_KEY]
    if hint is None:
        return None
    parts: Iterable[object] = hint.split(",") if isinstance(hint, str) else ()
    if isinstance(hint, Sequence) and not isinstance(hint, str):
        parts = (piece for entry in hint if isinstance(entry, str) for piece in entry.split(","))
    return frozenset(_canonical(text) for part in parts if (text := str(part).strip()))


def match_subset(subset: frozenset[str] | None, endpoints: Iterable[str]) -> frozenset[str] | None:
    """The `endpoints` (`ip:port`) that a hint admits; None (no restriction) stays None.

    An entry without a port admits every endpoint of that address.
    """
    if subset is None:
        return None
    return frozenset(
        endpoint
        for endpoint in endpoints
        if endpoint in subset or endpoint.rpartition(":")[0].strip("[]") in subset
    )


def _canonical(entry: str) -> str:
    try:
        return str(parse_address(entry))
    except AddressError:
        return canonical_host(entry.strip("[]"))


def destination_value(endpoints: Sequence[str]) -> str:
    """The ordered list as one value: the pick first, fallbacks after it.

    Raises:
        ValueError: the list is empty or an entry is not `host:port`.
    """
    if not endpoints:
        raise ValueError("a destination needs at least one endpoint")
    return ",".join(map(_checked_endpoint, endpoints))


@lru_cache(maxsize=4096)
def _checked_endpoint(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isascii() and port.isdigit()) or _FORBIDDEN_IN_VALUE.search(endpoint):
        raise ValueError(f"{endpoint!r} is not an endpoint: expected ip:port")
    if "," in endpoint or " " in endpoint:
        raise ValueError(f"{endpoint!r} is not one endpoint")
    return endpoint


def decision_metadata(endpoints: Sequence[str] | None, lease_id: str) -> dict[str, dict[str, object]]:
    """Dynamic metadata of a decision: the destination, if there is one, and the ticket.

    Raises:
        ValueError: see `destination_value`.
    """
    found: dict[str, dict[str, object]] = {TICKET_NAMESPACE: {TICKET_KEY: lease_id}}
    if endpoints is not None:
        found[LB_NAMESPACE] = {DESTINATION: destination_value(endpoints)}
    return found


def served_endpoint(metadata: Metadata) -> str | None:
    """Who really served the request, if the gateway says so."""
    return _text(metadata, LB_NAMESPACE, SERVED_KEY)


def ticket(metadata: Metadata) -> str | None:
    """The lease a message or log entry belongs to, if any."""
    return _text(metadata, TICKET_NAMESPACE, TICKET_KEY)


def _text(metadata: Metadata, namespace: str, key: str) -> str | None:
    value = metadata.get(namespace, {}).get(key)
    return value if isinstance(value, str) and value else None


def check_header(name: str, value: str) -> None:
    """Refuse a header that a proxy would refuse, before it costs a request.

    Raises:
        ValueError: the name is not a lower-case token (pseudo-headers are not), it is one Envoy ignores,
            or the value holds control characters.
    """
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} is not a legal header name: use a lower-case token, no pseudo-header")
    if name == "host":
        raise ValueError("host cannot be set by an external processor")
    if _FORBIDDEN_IN_VALUE.search(value):
        raise ValueError(f"the value of header {name} holds control characters")
