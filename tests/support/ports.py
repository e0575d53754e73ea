"""Loopback ports for programs that cannot be told to choose one themselves."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """`count` different ports nobody listens on now. Prefer port 0 where a program supports it."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def free_port() -> int:
    """One free port."""
    return free_ports(1)[0]
