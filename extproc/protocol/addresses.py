"""Network addresses as text: `host:port`, `[v6]:port`. An *endpoint* is one whose host is an IP literal.

Envoy compares endpoints as strings against its resolved hosts, so there must be one spelling: lower-case,
compressed IPv6 in brackets, port in decimal without leading zeros.
"""

import ipaddress
from typing import NamedTuple

from extproc.core.errors import WarmrouteError


class AddressError(WarmrouteError, ValueError):
    """Text that should be `host:port` and is not."""


class Address(NamedTuple):
    """A host (name or IP literal without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_resolved(self) -> bool:
        """Whether the host is an IP literal: what Envoy can match."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def parse_address(text: str, lowest_port: int = 1) -> Address:
    """`host:port` to an `Address`; IP literals come back in their canonical spelling.

    `lowest_port=0` admits port 0: an address to listen on, where the system chooses the port.

    Raises:
        AddressError: no port, one outside `lowest_port`..65535, an empty host, or IPv6 without brackets.
    """
    host, separator, port_text = text.strip().rpartition(":")
    if not separator or not host:
        raise AddressError(f"{text!r} is not an address: write host:port, for example 10.0.0.7:8000")
    if not (port_text.isascii() and port_text.isdigit() and lowest_port <= int(port_text) < 65_536):
        raise AddressError(
            f"{text!r} has no valid port: write host:port with a port from {lowest_port} to 65535"
        )
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host and "//" not in host:
        raise AddressError(f"{text!r}: write an IPv6 address in brackets, for example [fd00::7]:8000")
    if not host or any(character.isspace() or character in "/@?#[]" for character in host):
        raise AddressError(f"{text!r} is not an address: write host:port without scheme or path")
    return Address(canonical_host(host), int(port_text))


def canonical_host(host: str) -> str:
    """An IP literal in the spelling Envoy uses; a name in lower case."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()
