"""Addresses in the file: what is malformed is found when it is read, not when it is first used."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from extproc.protocol.addresses import parse_address
from extproc.protocol.kv_endpoints import resolve_kv_endpoint


def _listen(value: Any) -> Any:
    try:
        parse_address(_text(value), lowest_port=0)
    except ValueError as error:
        raise ValueError(f"{error}; the host 0.0.0.0 is every address of this machine") from error
    return value


def _listen_or_off(value: Any) -> Any:
    try:
        return value if value == "" else _listen(value)
    except ValueError as error:
        raise ValueError(f'{error}; "" is off') from error


def _endpoint(value: Any) -> Any:
    parse_address(_text(value))
    return value


def _host(value: Any) -> Any:
    try:
        parse_address(f"{_text(value)}:1")
    except ValueError:
        raise ValueError(f"{value!r} is not a host name: write it without scheme, port or path") from None
    return value


def _kv_endpoint(value: Any) -> Any:
    resolve_kv_endpoint(_text(value), "*", 0)
    return value


def _text(value: Any) -> str:
    """What YAML took for a number, or for a switch, is no address either."""
    return value if isinstance(value, str) else f"{value}"


ListenAddress = Annotated[str, BeforeValidator(_listen)]
"""`host:port`; with port 0 the system chooses one."""

ListenAddressOrOff = Annotated[str, BeforeValidator(_listen_or_off)]
"""The same, or empty."""

EndpointAddress = Annotated[str, BeforeValidator(_endpoint)]
"""`host:port` of somebody else."""

HostName = Annotated[str, BeforeValidator(_host)]
"""A name to resolve, or an IP address (IPv6 in brackets)."""

KvEndpoint = Annotated[str, BeforeValidator(_kv_endpoint)]
"""A ZMQ address of data-parallel rank 0."""
