"""Ports for programs that cannot choose one themselves."""

import socket


def free_ports(count: int) -> list[int]:
    """`count` different ports on loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
