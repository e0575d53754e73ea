import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.addresses import Address, AddressError, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port", "spelled"),
    [
        ("10.0.0.7:8000", "10.0.0.7", 8000, "10.0.0.7:8000"),
        (" worker-1.Pool:80 ", "worker-1.pool", 80, "worker-1.pool:80"),
        ("[FD00:0:0::7]:08000", "fd00::7", 8000, "[fd00::7]:8000"),
    ],
)
def test_addresses_have_one_spelling(text, host, port, spelled):
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == spelled


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":80",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:8o",
        "host:²",
        "fd00::7:80",
        "http://h:80",
        "[]:80",
        "a b:80",
        "u@h:80",
    ],
)
def test_what_is_not_an_address_is_refused_with_the_text(text):
    with pytest.raises(AddressError) as error:
        parse_address(text)
    assert repr(text) in str(error.value)


def test_a_url_is_not_taken_for_ipv6():
    with pytest.raises(AddressError, match="without scheme or path"):
        parse_address("http://h:80")


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), st.integers(1, 65_535))
def test_ip_addresses_survive_a_round_trip(ip, port):
    address = parse_address(str(Address(str(ip), port)))
    assert ipaddress.ip_address(address.host) == ip
    assert address.port == port
    assert address.is_resolved
    assert parse_address(str(address)) == address


def test_a_name_is_not_resolved():
    assert not parse_address("localhost:1").is_resolved


def test_port_zero_is_for_listening_only():
    assert parse_address("0.0.0.0:0", lowest_port=0) == Address("0.0.0.0", 0)
    with pytest.raises(AddressError, match="from 1 to 65535"):
        parse_address("0.0.0.0:0")
