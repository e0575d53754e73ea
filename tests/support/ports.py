"""Loopback ports for programs that cannot be told to choose one themselves, or must keep one over restarts.

They lie below those that the system gives to connections and to port 0, so that none is taken between being
chosen and being listened on. Each process that asks has a range of its own: an abstract Unix socket, which
ends with the process, says whose it is.
"""

import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

_LOWEST = 15_000
_RANGE = 500  # ports of one process, given out in turn
_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")

_reserved: dict[int, tuple[socket.socket | None, Iterator[int]]] = {}  # by process: forks have their own


def free_ports(count: int) -> list[int]:
    """`count` different ports nobody listens on now. Prefer port 0 where a program supports it."""
    numbers = _mine()
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            one = stack.enter_context(socket.socket())
            try:
                one.bind(("", next(numbers)))
            except OSError:
                continue  # somebody has it, or its last connections are not forgotten yet
            found.append(one.getsockname()[1])
        return found


def free_port() -> int:
    """One free port."""
    return free_ports(1)[0]


def _mine() -> Iterator[int]:
    """The ports of this process, again and again; those of the system where there is no room below it."""
    if os.getpid() not in _reserved:
        _reserved[os.getpid()] = _reserve()
    return _reserved[os.getpid()][1]


def _reserve() -> tuple[socket.socket | None, Iterator[int]]:
    first = int(_SYSTEM.read_text().split()[0]) if _SYSTEM.exists() else 0
    ranges = [range(start, start + _RANGE) for start in range(_LOWEST, first - _RANGE + 1, _RANGE)]
    random.Random(os.getpid()).shuffle(ranges)
    for ports in ranges:
        owner = socket.socket(socket.AF_UNIX)
        try:
            owner.bind(f"\0warmroute-tests-{ports.start}")
        except OSError:
            owner.close()
        else:
            return owner, itertools.cycle(ports)
    return None, itertools.repeat(0)
