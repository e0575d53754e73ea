import pytest

from extproc.config import ConfigError, parse

POOL = "pools: [{discovery: {static: ['10.0.0.1:8000']}}]\n"


def read(text):
    return parse(POOL + text, "test.yaml").peers


def test_alone_by_default():
    peers = read("")
    assert not peers.several
    assert peers.snapshot.path is None


def test_a_name_is_the_same_after_a_restart_and_another_for_each_process():
    peers = read("peers: {listen: '0.0.0.0:50060'}")
    assert peers.several
    assert peers.name_of("0.0.0.0:50051", 0).endswith(":50051/0")
    assert peers.name_of("0.0.0.0:50051", 0) == peers.name_of("0.0.0.0:50051", 0)
    assert peers.name_of("0.0.0.0:50051", 1) != peers.name_of("0.0.0.0:50051", 0)
    assert read("peers: {name: pod-7}").name_of("x:1", 2) == "pod-7/2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peers: {static: ['a:1']}", "set `listen`"),
        ("peers: {fade_after_s: 6, gone_after_s: 6}", "must be less"),
        ("processes: 0", "processes"),
    ],
)
def test_what_makes_no_sense_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_the_token_is_read_from_its_file(tmp_path):
    file = tmp_path / "token"
    peers = read(f"peers: {{token_file: '{file}'}}")
    with pytest.raises(ConfigError, match="cannot read"):
        peers.security()
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        peers.security()
    file.write_text("s\n")
    assert peers.security().metadata() == (("authorization", "Bearer s"),)


def test_tls_reaches_the_adapters():
    tls = read("peers: {tls: {certificate: c.pem, key: k.pem, ca: ca.pem, name: router}}").security().tls
    assert (str(tls.certificate), str(tls.key), str(tls.ca), tls.name) == (
        "c.pem",
        "k.pem",
        "ca.pem",
        "router",
    )
