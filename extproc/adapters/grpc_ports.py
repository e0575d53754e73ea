"""The ports of a gRPC server: all of them, or none."""

import errno
import socket
from collections.abc import Callable, Iterable

import grpc

from extproc.core.errors import WarmrouteError
from extproc.protocol.addresses import parse_address


def refuse_taken(address: str) -> None:
    """Find out that somebody listens on `address` (`host:port`) before much is done to listen there too.

    Whatever else may be wrong with the address is for gRPC to say, which tries more than one way.

    Raises:
        AddressError: `address` is not `host:port`.
        WarmrouteError: it is in use.
    """
    where = parse_address(address, lowest_port=0)
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that end do not count
            probe.bind((where.host, where.port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise cannot_listen(address) from error


def cannot_listen(address: str) -> WarmrouteError:
    """What is said when an address cannot be had."""
    return WarmrouteError(f"cannot listen on {address}: is the port in use, the address ours?")


async def bind_all(
    server: grpc.aio.Server, addresses: Iterable[str], bind: Callable[[str], int]
) -> list[int]:
    """Call `bind` for each of `addresses`; the ports. Where one cannot be had, the others are given back.

    Raises:
        Exception: what `bind` raises.
    """
    try:
        return [bind(address) for address in addresses]
    except BaseException:
        await server.start()  # gRPC gives ports back only where a server has run
        await server.stop(None)
        raise
