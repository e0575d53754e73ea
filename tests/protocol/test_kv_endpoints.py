import pytest

from extproc.protocol.kv_endpoints import resolve_kv_endpoint


@pytest.mark.parametrize(
    ("template", "host", "rank", "expected"),
    [
        ("tcp://*:5557", "10.0.0.1", 0, "tcp://10.0.0.1:5557"),
        ("tcp://*:5557", "10.0.0.1", 3, "tcp://10.0.0.1:5560"),
        ("tcp://0.0.0.0:5557", "pod-1", 0, "tcp://pod-1:5557"),
        ("tcp://[::]:5557", "fd00::1", 1, "tcp://[fd00::1]:5558"),
        ("tcp://*:5557", "[fd00::1]", 0, "tcp://[fd00::1]:5557"),
        ("tcp://10.9.9.9:5557", "10.0.0.1", 2, "tcp://10.9.9.9:5559"),
        ("tcp://*:5557", "*", 1, "tcp://*:5558"),
        ("ipc:///tmp/kv", "x", 0, "ipc:///tmp/kv"),
        ("inproc://kv", "x", 0, "inproc://kv"),
        ("inproc://kv", "x", 2, "inproc://kv_dp2"),
    ],
)
def test_address_of_a_rank(template: str, host: str, rank: int, expected: str) -> None:
    assert resolve_kv_endpoint(template, host, rank) == expected


@pytest.mark.parametrize("template", ["tcp://*:0", "tcp://*", "http://x:1", "5557", "tcp://*:x"])
def test_address_without_a_port_is_an_error(template: str) -> None:
    with pytest.raises(ValueError, match=r"port|address"):
        resolve_kv_endpoint(template, "h", 0)


def test_ipc_address_cannot_have_ranks() -> None:
    with pytest.raises(ValueError, match="ranks"):
        resolve_kv_endpoint("ipc:///tmp/kv", "h", 1)


def test_ranks_end_where_ports_do() -> None:
    assert resolve_kv_endpoint("tcp://*:65535", "h", 0) == "tcp://h:65535"
    with pytest.raises(ValueError, match="rank 1 would have port 65536"):
        resolve_kv_endpoint("tcp://*:65535", "h", 1)
