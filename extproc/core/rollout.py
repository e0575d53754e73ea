"""How far a decision is acted on, by class of traffic: the way from first proof to full use.

| mode | who decides | what is logged |
|---|---|---|
| observe | the gateway's own balancing | what our policy would have done |
| shadow | a plain baseline policy | what it did, and what our policy would have done |
| enforce | our policy | what it did |

Classes are tried in order. A class takes the requests that everything it names matches; of those, a
percentage of sessions (of requests, where there is no session), always the same ones: a session's place is a
hash of its key and the class's name, so raising the percentage only adds sessions. What no class takes has
the mode of the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import xxhash

_PLACES = 10_000  # percentages count to the hundredth


class Mode(StrEnum):
    """See the module's table."""

    OBSERVE = "observe"
    SHADOW = "shadow"
    ENFORCE = "enforce"


class Traffic(NamedTuple):
    """What classes can ask of a request. `key` is its session, or itself; `model` as the client wrote it."""

    headers: Mapping[str, str]
    tenant: str
    pool: str
    model: str
    key: str


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A part of the traffic. None matches anything; `header` is a lower-case name."""

    name: str
    mode: Mode = Mode.ENFORCE
    percent: float = 100.0
    header: str | None = None
    values: frozenset[str] | None = None
    tenants: frozenset[str] | None = None
    pools: frozenset[str] | None = None
    models: frozenset[str] | None = None

    def takes(self, traffic: Traffic) -> bool:
        """Whether a request belongs to it."""
        if self.header is not None:
            value = traffic.headers.get(self.header)
            if value is None or not _in(value, self.values):
                return False
        named = ((traffic.tenant, self.tenants), (traffic.pool, self.pools), (traffic.model, self.models))
        return all(_in(value, wanted) for value, wanted in named) and self._has_place(traffic.key)

    def _has_place(self, key: str) -> bool:
        if self.percent >= 100.0:
            return True
        data = f"{self.name}\0{key}".encode("utf-8", "surrogatepass")
        return xxhash.xxh3_64_intdigest(data) % _PLACES < self.percent * (_PLACES / 100)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Modes of all traffic."""

    mode: Mode = Mode.ENFORCE
    classes: Sequence[TrafficClass] = ()

    def of(self, traffic: Traffic) -> tuple[Mode, str]:
        """The mode of a request, and the name of the class that took it; empty: none."""
        for one in self.classes:
            if one.takes(traffic):
                return one.mode, one.name
        return self.mode, ""

    @property
    def summary(self) -> str:
        """The mode, and those of classes that differ from it, for people."""
        others = [f"{one.name}: {one.mode.value}" for one in self.classes if one.mode is not self.mode]
        return self.mode.value + (f" ({', '.join(others)})" if others else "")

    @property
    def modes(self) -> frozenset[Mode]:
        """Modes that requests can have."""
        return frozenset({self.mode, *(one.mode for one in self.classes)})


def _in(value: str, wanted: frozenset[str] | None) -> bool:
    return wanted is None or value in wanted
