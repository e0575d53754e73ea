import socket

from loadtests.live.ports import free_ports, ports_in_a_row


def test_ports_are_different_and_free():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_ports_in_a_row_are_free_from_the_first_to_the_last():
    first = ports_in_a_row(4)
    for port in range(first, first + 4):
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))
