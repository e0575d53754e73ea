"""Damping of DNS answers: what a name means, given answers that come and go.

Answers may be subsets (round-robin DNS), late, or missing. An address joins at once; it leaves after
`drop_after` good answers in a row without it. A failed lookup says nothing, so it changes nothing.
"""

import ipaddress
from collections.abc import Iterable


class AddressMemory:
    """Addresses of one name.

    Args:
        drop_after: good answers in a row that must lack an address before it is dropped; 1 drops at once.
    """

    def __init__(self, drop_after: int = 3) -> None:
        if drop_after < 1:
            raise ValueError("drop_after must be at least 1")
        self._drop_after = drop_after
        self._absent: dict[str, int] = {}

    def observe(self, answer: Iterable[str]) -> None:
        """Take a good answer: IP literals, in any order. Of mixed families only IPv4 counts, as in Envoy."""
        addresses = preferred(answer)
        for address in list(self._absent):
            if address not in addresses:
                self._absent[address] += 1
                if self._absent[address] >= self._drop_after:
                    del self._absent[address]
        self._absent.update(dict.fromkeys(addresses, 0))

    @property
    def addresses(self) -> tuple[str, ...]:
        """What the name means now, in numeric order."""
        return tuple(sorted(self._absent, key=_numeric))


def preferred(answer: Iterable[str]) -> frozenset[str]:
    """The IPv4 addresses of an answer, or all of them when there is none."""
    addresses = {str(ipaddress.ip_address(text)) for text in answer}
    v4 = frozenset(address for address in addresses if ":" not in address)
    return v4 or frozenset(addresses)


def _numeric(address: str) -> tuple[int, int]:
    parsed = ipaddress.ip_address(address)
    return parsed.version, int(parsed)
