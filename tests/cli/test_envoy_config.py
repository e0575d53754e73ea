import json
from pathlib import Path

import pytest
import yaml

from extproc.adapters.envoy_bootstrap import (
    DEFAULT_PREFIXES,
    BodyMode,
    DnsWorkers,
    EdsFileWorkers,
    EdsServiceWorkers,
    EnvoyConfigError,
    EnvoySettings,
    PoolWorkers,
    RouterTls,
    StaticWorkers,
    bootstrap,
    to_yaml,
    write_workers_file,
)
from extproc.cli import main
from extproc.cli.envoy_config import envoy_settings
from extproc.config import ConfigError, parse

STATIC = {"static": ["10.0.0.1:8000"]}


def settings(*discovery, workers=None, **rest):
    pools = [{"name": f"pool-{number}", "discovery": one} for number, one in enumerate(discovery)]
    return envoy_settings(parse(yaml.safe_dump({"pools": pools, **rest})), workers)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "warmroute.yaml"
    path.write_text(yaml.safe_dump({"pools": [{"discovery": STATIC}]}))
    return path


def test_the_default_is_the_builders():
    assert settings(STATIC) == EnvoySettings(workers=StaticWorkers(("10.0.0.1:8000",)))


def test_what_the_file_says_arrives():
    made = settings(
        STATIC,
        listen="0.0.0.0:6000",
        limits={"body_bytes": 1234},
        envoy={
            "listen": "127.0.0.1:0",
            "admin": "[::1]:99",
            "body_mode": "FULL_DUPLEX_STREAMED",
            "message_timeout_s": 3,
            "first_token_observer": True,
            "version": "1.37",
            "trace_collector": "10.0.0.9:4317",
            "trace_percent": 2.5,
        },
    )
    assert made == EnvoySettings(
        workers=StaticWorkers(("10.0.0.1:8000",)),
        routers=("127.0.0.1:6000",),
        listen_address="127.0.0.1",
        listen_port=0,
        admin_address="::1",
        admin_port=99,
        envoy_version=(1, 37),
        body_mode=BodyMode.FULL_DUPLEX_STREAMED,
        body_limit=1234 + (1 << 20),
        message_timeout=3,
        first_token_observer=True,
        trace_collector="10.0.0.9:4317",
        trace_percent=2.5,
    )


def test_a_body_somewhat_over_our_limit_reaches_us_and_no_limit_is_too_large_for_envoy():
    assert settings(STATIC, limits={"body_bytes": 100}).body_limit > 100
    assert settings(STATIC, limits={"body_bytes": 1 << 40}).body_limit == (1 << 32) - 1


def test_routers_are_named_or_found_where_we_listen():
    assert settings(STATIC, listen="10.1.1.1:5").routers == ("10.1.1.1:5",)
    assert settings(STATIC, listen="[::]:5").routers == ("[::1]:5",)
    named = settings(STATIC, listen="127.0.0.1:0", envoy={"router": ["a:1", "b:2"]})
    assert named.routers == ("a:1", "b:2")
    with pytest.raises(EnvoyConfigError, match="leaves the port open"):
        settings(STATIC, listen="127.0.0.1:0")


def test_workers_of_all_pools_are_in_the_cluster():
    dns = {"dns": {"name": "pool.example", "port": 81, "interval_s": 7}}
    assert settings(dns).workers == DnsWorkers("pool.example", 81, 7)
    assert settings(STATIC, dns, STATIC).workers == StaticWorkers(("10.0.0.1:8000", "pool.example:81"))
    assert settings(STATIC, workers=["b:1"]).workers == StaticWorkers(("b:1",))


def test_a_file_in_envoys_form_is_watched_by_both(tmp_path):
    path = tmp_path / "workers.yaml"
    write_workers_file(path, ["10.0.0.1:8000"])
    assert settings({"file": str(path)}, {"file": str(path)}).workers == EdsFileWorkers(str(path))
    path.write_text(path.read_text().replace("cluster_name: workers", "clusterName: engines"))
    assert settings({"file": str(path)}).workers == EdsFileWorkers(str(path), assignment="engines")
    assert settings(STATIC, envoy={"eds_file": str(path)}).workers.assignment == "engines"


def test_a_file_that_is_not_there_yet_is_taken_on_trust(tmp_path):
    path = str(tmp_path / "later.yaml")
    assert settings({"file": path}).workers == EdsFileWorkers(path)


def test_what_envoy_cannot_follow_comes_from_us_or_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:8000]")
    for discovery in ([{"file": str(path)}], [{"file": str(path)}, STATIC]):
        assert settings(*discovery).workers == EdsServiceWorkers()
    never = {"envoy": {"eds": "never"}}
    with pytest.raises(EnvoyConfigError, match="not in Envoy's EDS form"):
        settings({"file": str(path)}, **never)
    with pytest.raises(EnvoyConfigError, match="one file or resolve names"):
        settings({"file": str(path)}, STATIC, **never)
    path.write_text("- [")
    with pytest.raises(EnvoyConfigError, match="cannot read"):
        settings({"file": str(path)})


def test_workers_come_from_us_if_that_is_wished(config, capsys):
    assert settings(STATIC, envoy={"eds": "always"}).workers == EdsServiceWorkers()
    assert main(["envoy-config", "-c", str(config), "--format", "json", "--eds"]) == 0
    assert json.loads(capsys.readouterr().out) == bootstrap(EnvoySettings(workers=EdsServiceWorkers()))
    config.write_text(config.read_text() + "envoy: {eds: always}\n")
    assert main(["envoy-config", "-c", str(config), "--format", "json", "--no-eds"]) == 0
    assert json.loads(capsys.readouterr().out) == bootstrap(settings(STATIC))
    assert main(["envoy-config", "-c", str(config), "--eds", "--worker", "a:1"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_the_command_prints_yaml_with_comments(config, capsys):
    assert main(["envoy-config", "-c", str(config)]) == 0
    assert capsys.readouterr().out == to_yaml(bootstrap(settings(STATIC)))


def test_the_command_prints_json(config, capsys):
    assert main(["envoy-config", "-c", str(config), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == bootstrap(settings(STATIC))


def test_options_come_before_the_file(config, tmp_path):
    target = tmp_path / "envoy.json"
    command = [
        *("envoy-config", "-c", str(config), "--format", "json", "-o", str(target)),
        *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:9", "--router", "a:1", "--router", "b:2"),
        *("--worker", "10.0.0.9:1", "--envoy-version", "1.36", "--body-mode", "FULL_DUPLEX_STREAMED"),
        *("--first-token-observer", "--no-stream-usage"),
    ]
    assert main(command) == 0
    assert json.loads(target.read_text()) == bootstrap(
        EnvoySettings(
            workers=StaticWorkers(("10.0.0.9:1",)),
            routers=("a:1", "b:2"),
            listen_address="127.0.0.1",
            listen_port=0,
            admin_port=9,
            envoy_version=(1, 36),
            body_mode=BodyMode.FULL_DUPLEX_STREAMED,
            first_token_observer=True,
            stream_usage=False,
        )
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "nowhere"], "not an address"),
        (["--envoy-version", "1.1"], "choose one of"),
        (["-o", "/nowhere/at/all"], "cannot write /nowhere/at/all"),
    ],
)
def test_mistakes_are_explained(config, capsys, options, words):
    assert main(["envoy-config", "-c", str(config), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_file_is_explained(capsys):
    assert main(["envoy-config", "-c", str(Path("/nowhere.yaml"))]) == 2
    assert "/nowhere.yaml" in capsys.readouterr().err


def test_a_kubernetes_service_reaches_envoy_through_us():
    kubernetes = {"kubernetes": {"service": "vllm", "port": 8000}}
    assert settings(kubernetes).workers == EdsServiceWorkers()
    assert settings(kubernetes, STATIC).workers == EdsServiceWorkers()
    with pytest.raises(EnvoyConfigError, match="cannot watch a Kubernetes Service"):
        settings(kubernetes, envoy={"eds": "never"})


TENANTS = {
    "identity": [
        {"jwt": {"payload": "token", "claim": ["org"]}},
        {"metadata": {"namespace": "my.filter", "path": ["tenant"]}},
        {"attribute": "connection.uri_san_peer_certificate"},
    ],
    "policies": {"acme": {"pools": ["pool-0"]}},
}


def test_each_of_several_pools_has_a_cluster_that_follows_its_own_discovery():
    made = settings(
        STATIC, {"dns": {"name": "engines", "port": 8000}}, {"file": "w.yaml", "static": ["1.1.1.1:1"]}
    )
    assert made.workers == EdsServiceWorkers()  # Envoy cannot follow all of them at once by itself
    assert made.pools == (
        PoolWorkers("pool-0", StaticWorkers(("10.0.0.1:8000",))),
        PoolWorkers("pool-1", DnsWorkers("engines", 8000, 5.0)),
        PoolWorkers("pool-2", EdsServiceWorkers("workers/pool-2")),
    )
    always = settings(STATIC, STATIC, envoy={"eds": "always"})
    assert [pool.workers for pool in always.pools] == [
        EdsServiceWorkers("workers/pool-0"),
        EdsServiceWorkers("workers/pool-1"),
    ]
    assert settings(STATIC).pools == ()


@pytest.mark.parametrize(
    ("rest", "workers"), [({"envoy": {"eds_file": "w.yaml", "eds": "never"}}, None), ({}, ["10.0.0.9:1"])]
)
def test_workers_that_do_not_say_of_which_pool_they_are(rest, workers):
    with pytest.raises(EnvoyConfigError, match="of which pool"):
        settings(STATIC, STATIC, workers=workers, **rest)


def test_tenants_decide_what_envoy_sends_and_what_happens_when_we_fail():
    made = settings(STATIC, tenants=TENANTS)
    assert made.forwarded_namespaces == ("envoy.filters.http.jwt_authn", "my.filter")
    assert made.request_attributes == ("connection.uri_san_peer_certificate",)
    assert (made.fail_open, made.routed_prefixes, made.named_only) == (False, ("/",), False)
    free = settings(STATIC, tenants={**TENANTS, "policies": {}, "unknown": {}})
    assert (free.fail_open, free.routed_prefixes) == (True, DEFAULT_PREFIXES)
    pinned = settings(STATIC, tenants={**TENANTS, "unknown": {"workers": ["10.0.0.1"]}})
    assert pinned.named_only


def test_the_salts_key_need_not_be_on_the_machine_that_builds_the_configuration(tmp_path, capsys):
    salted = {
        "identity": [{"header": "t"}],
        "unknown": {"isolation": "salted"},
        "salt_key": {"env": "NOT_SET_HERE"},
    }
    path = tmp_path / "warmroute.yaml"
    path.write_text(yaml.safe_dump({"pools": [{"discovery": STATIC}], "tenants": salted}))
    assert main(["envoy-config", "-c", str(path)]) == 0
    assert "failure_mode_allow" not in capsys.readouterr().out


def test_tls_to_us_needs_our_authority():
    tls = {"certificate": "/tls/cert.pem", "key": "/tls/key.pem"}
    with pytest.raises(EnvoyConfigError, match=r"set `envoy\.router_tls\.ca`"):
        settings(STATIC, tls=tls)
    known = {"ca": "/tls/ca.pem", "name": "warmroute.llm.svc"}
    assert settings(STATIC, tls=tls, envoy={"router_tls": known}).router_tls == RouterTls(
        "/tls/ca.pem", "warmroute.llm.svc"
    )
    # Where something else ends TLS for us.
    assert settings(STATIC, envoy={"router_tls": known}).router_tls is not None
    with pytest.raises(ConfigError, match="belong together"):
        settings(STATIC, envoy={"router_tls": {**known, "key": "/tls/own.pem"}})
