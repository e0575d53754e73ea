"""Files that list engine servers, in our form or in Envoy's. YAML; JSON is a subset of it.

Ours is a list, plain or under `workers:`. An entry is `host:port` or a mapping of `Member` fields:

    - 10.0.0.1:8000
    - {endpoint: 10.0.0.2:8000, dp_size: 2, kv_events: "tcp://*:5557"}

Envoy's is what a file-based EDS cluster watches: a DiscoveryResponse of ClusterLoadAssignments, so one file
serves both. What Envoy does not know stands in an endpoint's metadata:

    metadata: {filter_metadata: {warmroute: {dp_size: 2}}}

Endpoints that Envoy's file marks unhealthy, draining or timed out are left out.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from extproc.core.errors import ProtocolError
from extproc.core.types import Member
from extproc.protocol.addresses import AddressError, parse_address

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former takes a fifth of the time
_UNUSABLE = ("UNHEALTHY", "DRAINING", "TIMEOUT")
# Besides its own errors, PyYAML lets through those of the types it makes: a date that is none, for instance.
_UNREADABLE = (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError)
_TYPES: Mapping[str, type] = {
    "endpoint": str,
    "pool": str,
    "dp_size": int,
    "dp_start_rank": int,
    "kv_events": str,
    "kv_replay": str,
    "kv_bind": bool,
    "revision": str,
    "cold": bool,
}


def parse_members(text: str, template: Member, cluster: str | None = None) -> tuple[Member, ...]:
    """Members in file order; fields the file does not give are the template's.

    Hosts may be names: resolving them is not done here. `cluster` restricts an Envoy file to the load
    assignment of that name.

    Raises:
        ProtocolError: neither form, an address that is none, a field that is unknown or of the wrong type,
            or one endpoint listed twice with different settings. The message names the entry.
    """
    try:
        data = yaml.load(text, Loader=_LOADER)  # noqa: S506 - both are safe ones
    except _UNREADABLE as error:
        raise ProtocolError(f"not valid YAML or JSON: {' '.join(str(error).split())}") from error
    members: dict[str, Member] = {}
    try:
        for entry in _entries(data, cluster):
            member = _member(entry, template)
            if members.setdefault(member.endpoint, member) != member:
                raise ProtocolError(f"{member.endpoint} is listed twice with different settings")
    except RecursionError as error:  # libyaml reads what Python cannot show
        raise ProtocolError("nested too deeply") from error
    return tuple(members.values())


def _entries(data: Any, cluster: str | None) -> Iterator[Any]:
    if isinstance(data, list):
        return iter(data)
    if isinstance(data, dict):
        if isinstance(data.get("workers"), list):
            return iter(data["workers"])
        if isinstance(data.get("resources"), list):
            return _assignments(data["resources"], cluster)
        if "endpoints" in data:
            return _assignments([data], cluster)
    raise ProtocolError(
        "no list of workers: write a list of host:port, `workers:` with such a list, or Envoy's EDS form"
    )


def _assignments(resources: Iterable[Any], cluster: str | None) -> Iterator[Mapping[str, Any]]:
    for resource in resources:
        if not isinstance(resource, dict):
            raise ProtocolError(f"a resource must be a mapping, got {resource!r}")
        name = _either(resource, "cluster_name")
        if cluster is not None and name != cluster:
            continue
        for locality in _list(resource, "endpoints"):
            for endpoint in _list(locality, "lb_endpoints"):
                if _either(endpoint, "health_status") not in _UNUSABLE:
                    yield _envoy_entry(endpoint)


def _envoy_entry(lb_endpoint: Any) -> Mapping[str, Any]:
    try:
        address = _either(lb_endpoint["endpoint"]["address"], "socket_address")
        endpoint = f"{_bracketed(address['address'])}:{_either(address, 'port_value')}"
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"an endpoint has no socket address: {lb_endpoint!r}") from error
    extra = (
        _either(_either(_either(lb_endpoint, "metadata") or {}, "filter_metadata") or {}, "warmroute") or {}
    )
    if not isinstance(extra, dict):
        raise ProtocolError(f"warmroute metadata of {endpoint} must be a mapping")
    # Numbers in protobuf's Struct are floats.
    whole = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in extra.items()
    }
    return {**whole, "endpoint": endpoint}


def _either(mapping: Any, name: str) -> Any:
    """A field under its protobuf name or its JSON name."""
    if not isinstance(mapping, dict):
        raise ProtocolError(f"expected a mapping with {name}, got {mapping!r}")
    head, *rest = name.split("_")
    return mapping.get(name, mapping.get(head + "".join(part.title() for part in rest)))


def _list(mapping: Any, name: str) -> list[Any]:
    value = _either(mapping, name)
    if value is not None and not isinstance(value, list):
        raise ProtocolError(f"{name} must be a list, got {value!r}")
    return value or []


def _bracketed(host: str) -> str:
    return f"[{host}]" if host.count(":") else host


def _member(entry: Any, template: Member) -> Member:
    if isinstance(entry, str):
        entry = {"endpoint": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("endpoint"), str):
        raise ProtocolError(f"{entry!r} is not a worker: write host:port, or a mapping with `endpoint`")
    where = entry["endpoint"]
    for key, value in entry.items():
        expected = _TYPES.get(key)
        if expected is None:
            raise ProtocolError(f"{where}: no field {key!r}; known are {', '.join(_TYPES)}")
        nullable = key in {"dp_start_rank", "kv_events", "kv_replay", "revision"}
        if type(value) is not expected and not (nullable and value is None):
            raise ProtocolError(f"{where}: {key} must be {expected.__name__}, got {value!r}")
    if entry.get("dp_size", 1) < 1:
        raise ProtocolError(f"{where}: dp_size must be at least 1")
    if (entry.get("dp_start_rank") or 0) < 0:
        raise ProtocolError(f"{where}: dp_start_rank must be at least 0")
    try:
        endpoint = str(parse_address(where))
    except AddressError as error:
        raise ProtocolError(str(error)) from error
    return dataclasses.replace(template, **{**entry, "endpoint": endpoint})
