"""The ports of a gRPC server: all of them, or none."""

from collections.abc import Callable, Iterable

import grpc


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
