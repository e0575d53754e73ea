import pytest

from extproc.cli import main
from extproc.config import ConfigError, parse

POOL = "pools: [{discovery: {static: ['h:1']}}]\n"


def error_of(text):
    with pytest.raises(ConfigError) as caught:
        parse(text, "warmroute.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("listen: foo", "listen: 'foo'"),
        ("listen: 50051", "listen: '50051'"),
        ("listen: 'h:65536'", "listen: 'h:65536'"),
        ("listen: ''", "listen: ''"),
        ("admin: {listen: foo}", "admin.listen: 'foo'"),
        ("admin: {listen: off}", "admin.listen: 'False'"),
        ("peers: {listen: ':5'}", "peers.listen: ':5'"),
        ("peers: {listen: 'h:5', static: ['h:5', 'g']}", "peers.static.1: 'g'"),
        ("peers: {listen: 'h:5', static: ['h:0']}", "peers.static.0: 'h:0'"),
        ("envoy: {listen: foo}", "envoy.listen: 'foo'"),
        ("envoy: {admin: ''}", "envoy.admin: ''"),
        ("envoy: {router: [foo]}", "envoy.router.0: 'foo'"),
        ("envoy: {trace_collector: 'http://c:4317'}", "envoy.trace_collector: 'http://c:4317'"),
    ],
)
def test_a_malformed_address_is_named_with_what_a_good_one_looks_like(text, setting):
    message = error_of(POOL + text)
    assert f"line 2: {setting}" in message
    assert "write host:port" in message


@pytest.mark.parametrize("section", ["admin", "peers"])
def test_what_may_be_off_says_how(section):
    assert '"" is off' in error_of(POOL + f"{section}: {{listen: foo}}")
    assert getattr(parse(POOL + f"{section}: {{listen: ''}}"), section).listen == ""


def test_a_port_may_be_left_to_the_system_where_we_listen():
    config = parse(POOL + "listen: 'localhost:0'\nadmin: {listen: '[::1]:0'}\npeers: {listen: '0.0.0.0:0'}\n")
    assert (config.listen, config.admin.listen, config.peers.listen) == (
        "localhost:0",
        "[::1]:0",
        "0.0.0.0:0",
    )


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("{discovery: {static: [foo]}}", "discovery.static.0.endpoint: 'foo' is not an address"),
        ("{discovery: {dns: {name: 'http://h', port: 1}}}", "discovery.dns.name: 'http://h' is not a host"),
        (
            "{discovery: {static: ['h:1']}, kv_events: {endpoint: foo}}",
            "kv_events.endpoint: 'foo' is not a ZMQ",
        ),
        (
            "{discovery: {static: ['h:1']}, kv_events: {replay: 'tcp://*:0'}}",
            "kv_events.replay: tcp://*:0: port",
        ),
        (
            "{discovery: {static: [{endpoint: 'h:1', kv_events: 'h:5557'}]}}",
            "static.0.kv_events: 'h:5557' is not a ZMQ address like tcp://*:5557",
        ),
    ],
)
def test_addresses_of_workers_are_read_too(pool, expected):
    assert expected in error_of(f"pools: [{pool}]")


def test_the_name_of_peers_is_one():
    peers = "peers: {listen: 'h:1', dns: {name: 'a b', port: 1}}"
    assert "peers.dns.name: 'a b' is not a host name" in error_of(POOL + peers)


def test_check_says_it_before_serve_does(tmp_path, capsys):
    path = tmp_path / "warmroute.yaml"
    path.write_text(POOL + "listen: foo\n")
    for command in ("check", "serve"):
        assert main([command, "-c", str(path)]) == 2
        assert "line 2: listen: 'foo' is not an address: write host:port" in capsys.readouterr().err
