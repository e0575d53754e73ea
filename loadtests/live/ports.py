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


def ports_in_a_row(count: int) -> int:
    """The first of `count` successive ports on loopback that nobody listens on now."""
    while True:
        (first,) = free_ports(1)
        if first + count <= 65_536 and all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
