import socket

import grpc
import pytest

from extproc.adapters.grpc_ports import bind_all, refuse_taken
from extproc.core.errors import WarmrouteError


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def new_server():
    return grpc.aio.server(options=[("grpc.so_reuseport", 0)])


async def test_all_ports_are_had_in_order():
    server = new_server()
    ports = await bind_all(server, ["127.0.0.1:0", "127.0.0.1:0"], server.add_insecure_port)
    await server.start()
    assert len(set(ports)) == 2
    assert not any(is_free(port) for port in ports)
    await server.stop(None)


async def test_where_one_cannot_be_had_the_others_are_given_back():
    server, bound = new_server(), []

    def bind(address):
        if bound:
            raise LookupError(address)
        bound.append(server.add_insecure_port(address))
        return bound[0]

    with pytest.raises(LookupError):
        await bind_all(server, ["127.0.0.1:0", "127.0.0.1:0"], bind)
    again = new_server()
    assert again.add_insecure_port(f"127.0.0.1:{bound[0]}") == bound[0]
    await again.start()
    await again.stop(None)


def test_an_address_that_somebody_listens_on_is_refused_and_then_free_again():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        taken.listen()
        with pytest.raises(WarmrouteError, match=f"cannot listen on {address}: is the port in use"):
            refuse_taken(address)
    refuse_taken(address)
    refuse_taken(address)  # looking takes nothing


@pytest.mark.parametrize("address", ["203.0.113.7:9002", "host.invalid:9002", "127.0.0.1:0"])
def test_what_is_not_taken_is_left_to_grpc(address, monkeypatch):
    monkeypatch.setattr(socket.socket, "bind", refusing(socket.socket.bind))
    refuse_taken(address)


def refusing(bind):
    def refused(self, where):
        if where[0].endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        bind(self, where)

    return refused
