import itertools
import json
import re
import subprocess
import sys

import pytest
import yaml

from extproc.adapters import envoy_bootstrap as eb
from extproc.adapters.envoy_bootstrap import (
    SUPPORTED_VERSIONS,
    BodyMode,
    DnsWorkers,
    EdsFileWorkers,
    EnvoyConfigError,
    EnvoySettings,
    StaticWorkers,
    bootstrap,
)
from extproc.protocol.addresses import AddressError
from tests.support.envoy import http_manager, require_envoy

WORKERS = StaticWorkers(("10.0.0.1:8000", "10.0.0.2:8000"))
DESTINATION = "x-gateway-destination-endpoint"


def cluster(config, name):
    return next(one for one in config["static_resources"]["clusters"] if one["name"] == name)


def http_filter(config, name):
    found = [one for one in http_manager(config)["http_filters"] if one["name"] == name]
    return found[0]["typed_config"] if found else None


def walk(value):
    yield value
    if isinstance(value, dict):
        for one in value.values():
            yield from walk(one)
    elif isinstance(value, list):
        for one in value:
            yield from walk(one)


def test_the_same_settings_give_the_same_text():
    settings = EnvoySettings(workers=WORKERS, first_token_observer=True)
    assert eb.to_yaml(bootstrap(settings)) == eb.to_yaml(bootstrap(settings))


def test_yaml_with_and_without_comments_and_json_say_the_same():
    config = bootstrap(EnvoySettings(workers=WORKERS, first_token_observer=True))
    assert yaml.safe_load(eb.to_yaml(config)) == config
    assert yaml.safe_load(eb.to_yaml(config, comments=False)) == config
    assert json.loads(eb.to_json(config)) == config


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_only_metadata_chooses_the_destination(version):
    config = bootstrap(EnvoySettings(workers=WORKERS, envoy_version=version))
    policy = cluster(config, "workers")["load_balancing_policy"]["policies"][0]["typed_extension_config"]
    assert policy["typed_config"]["override_host_sources"] == [
        {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}
    ]
    assert ("selected_host_key" in policy["typed_config"]) == (version >= (1, 38))
    assert "ORIGINAL_DST" not in json.dumps(config)


def test_headers_only_the_router_may_set_are_removed_before_anything_reads_them():
    manager = http_manager(bootstrap(EnvoySettings(workers=WORKERS)))
    mutations = manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"]
    assert {"remove": DESTINATION} in mutations
    with pytest.raises(EnvoyConfigError, match=DESTINATION):
        EnvoySettings(workers=WORKERS, internal_headers=("x-other",))


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_what_an_old_envoy_does_not_know_is_left_out(version):
    config = bootstrap(EnvoySettings(workers=WORKERS, envoy_version=version))
    assert (http_filter(config, "envoy.filters.http.sse_to_metadata") is not None) == (version >= (1, 38))
    common = http_manager(config)["access_log"][0]["typed_config"]["common_config"]
    tags = {tag["tag"] for tag in common["custom_tags"]}
    assert tags == {"ticket"} | ({"first_body_us", "prefill_us"} if version >= (1, 37) else set())


def test_usage_of_streamed_answers_can_be_left_alone():
    config = bootstrap(EnvoySettings(workers=WORKERS, stream_usage=False))
    assert "sse_to_metadata" not in json.dumps(config)
    assert http_filter(config, "envoy.filters.http.json_to_metadata") is not None


def test_body_modes():
    buffered = http_filter(bootstrap(EnvoySettings(workers=WORKERS)), "envoy.filters.http.ext_proc")
    assert buffered["processing_mode"]["request_body_mode"] == "BUFFERED"
    assert buffered["failure_mode_allow"] is True
    duplex = http_filter(
        bootstrap(EnvoySettings(workers=WORKERS, body_mode=BodyMode.FULL_DUPLEX_STREAMED)),
        "envoy.filters.http.ext_proc",
    )
    assert duplex["processing_mode"]["request_body_mode"] == "FULL_DUPLEX_STREAMED"
    assert duplex["processing_mode"]["request_trailer_mode"] == "SEND"


def test_every_namespace_the_router_sends_is_received():
    filter_ = http_filter(bootstrap(EnvoySettings(workers=WORKERS)), "envoy.filters.http.ext_proc")
    assert filter_["metadata_options"]["receiving_namespaces"]["untyped"] == ["envoy.lb", "warmroute"]


def test_the_observer_is_off_unless_asked_for():
    name = "envoy.filters.http.ext_proc.first_token"
    assert http_filter(bootstrap(EnvoySettings(workers=WORKERS)), name) is None
    observer = http_filter(bootstrap(EnvoySettings(workers=WORKERS, first_token_observer=True)), name)
    assert observer["observability_mode"] is True
    assert observer["processing_mode"]["response_body_mode"] == "STREAMED"
    assert observer["metadata_options"]["forwarding_namespaces"]["untyped"] == ["warmroute"]


def test_spans_are_made_only_where_a_collector_takes_them():
    assert "tracing" not in http_manager(bootstrap(EnvoySettings(workers=WORKERS)))
    config = bootstrap(
        EnvoySettings(workers=WORKERS, trace_collector="collector.example:4317", trace_percent=5.0)
    )
    tracing = http_manager(config)["tracing"]
    assert tracing["random_sampling"] == {"value": 5.0}
    assert tracing["spawn_upstream_span"] is True
    service = tracing["provider"]["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"]
    endpoint = cluster(config, service)["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
    assert endpoint["address"]["socket_address"] == {"address": "collector.example", "port_value": 4317}


def test_paths_outside_the_routed_prefixes_never_ask_the_router():
    config = bootstrap(
        EnvoySettings(workers=WORKERS, first_token_observer=True, routed_prefixes=("/v1/", "/x/"))
    )
    routes = http_manager(config)["route_config"]["virtual_hosts"][0]["routes"]
    by_match = {json.dumps(route["match"]): route for route in routes}
    assert "typed_per_filter_config" not in by_match['{"prefix": "/v1/"}']
    assert "typed_per_filter_config" not in by_match['{"prefix": "/x/"}']
    off = by_match['{"prefix": "/"}']["typed_per_filter_config"]
    assert off["envoy.filters.http.ext_proc"]["disabled"] is True
    assert off["envoy.filters.http.ext_proc.first_token"]["disabled"] is True
    assert routes[-1]["match"] == {"prefix": "/"}
    embeddings = by_match['{"path": "/v1/embeddings"}']["typed_per_filter_config"]
    assert embeddings["envoy.filters.http.json_to_metadata"]["disabled"] is True
    assert "envoy.filters.http.ext_proc" not in embeddings


def test_retries_follow_the_list():
    host = http_manager(bootstrap(EnvoySettings(workers=WORKERS, retries=4)))["route_config"][
        "virtual_hosts"
    ][0]
    retry = host["retry_policy"]
    assert set(retry["retry_on"].split(",")) == {
        "connect-failure",
        "refused-stream",
        "reset",
        "retriable-status-codes",
    }
    assert retry["retriable_status_codes"] == [503]
    assert retry["num_retries"] == 4
    careful = http_manager(bootstrap(EnvoySettings(workers=WORKERS, retry_resets=False)))["route_config"]
    retry_on = careful["virtual_hosts"][0]["retry_policy"]["retry_on"].split(",")
    assert "reset-before-request" in retry_on
    assert "reset" not in retry_on
    none = http_manager(bootstrap(EnvoySettings(workers=WORKERS, retries=0)))["route_config"][
        "virtual_hosts"
    ][0]
    assert "retry_policy" not in none
    assert retry["retry_host_predicate"][0]["name"] == "envoy.retry_host_predicates.previous_hosts"


def test_limits_and_times_reach_their_places():
    config = bootstrap(
        EnvoySettings(
            workers=WORKERS,
            body_limit=123,
            response_limit=456,
            message_timeout=0.25,
            upstream_idle_timeout=3,
            log_flush_interval=0.5,
            log_progress_interval=None,
            listen_address="10.9.8.7",
            listen_port=0,
            admin_port=0,
            node_id="n",
            node_cluster="c",
        )
    )
    listener = config["static_resources"]["listeners"][0]
    assert listener["per_connection_buffer_limit_bytes"] == 456
    assert listener["address"]["socket_address"] == {"address": "10.9.8.7", "port_value": 0}
    assert config["admin"]["address"]["socket_address"]["port_value"] == 0
    assert config["node"] == {"id": "n", "cluster": "c"}
    manager = http_manager(config)
    assert manager["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"] == 123
    assert "access_log_options" not in manager
    assert http_filter(config, "envoy.filters.http.ext_proc")["message_timeout"] == "0.250s"
    common = manager["access_log"][0]["typed_config"]["common_config"]
    assert common["buffer_flush_interval"] == "0.500s"
    options = cluster(config, "workers")["typed_extension_protocol_options"]
    assert next(iter(options.values()))["common_http_protocol_options"] == {"idle_timeout": "3s"}


def test_kinds_of_workers():
    def kind(workers):
        return cluster(bootstrap(EnvoySettings(workers=workers)), "workers")

    assert kind(WORKERS)["type"] == "STATIC"
    assert (
        kind(StaticWorkers(("worker-1:8000", "10.0.0.1:1")))["cluster_type"]["name"] == "envoy.clusters.dns"
    )
    dns = kind(DnsWorkers("workers.example", 8000, refresh_s=2))["cluster_type"]["typed_config"]
    assert (dns["dns_refresh_rate"], dns["dns_lookup_family"]) == ("2s", "V4_PREFERRED")
    eds = kind(EdsFileWorkers("/etc/w.yaml"))
    assert eds["type"] == "EDS"
    assert eds["eds_cluster_config"]["eds_config"]["path_config_source"] == {"path": "/etc/w.yaml"}
    # Envoy refuses to watch a path without a folder in it.
    bare = kind(EdsFileWorkers("w.yaml"))
    assert bare["eds_cluster_config"]["eds_config"]["path_config_source"] == {"path": "./w.yaml"}


def test_several_routers_are_all_tried():
    config = bootstrap(EnvoySettings(workers=WORKERS, routers=("10.0.0.8:50051", "10.0.0.9:50051")))
    endpoints = cluster(config, "warmroute")["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert [one["endpoint"]["address"]["socket_address"]["address"] for one in endpoints] == [
        "10.0.0.8",
        "10.0.0.9",
    ]
    # The log goes to each of them.
    for name, address in (("warmroute-log-1", "10.0.0.8"), ("warmroute-log-2", "10.0.0.9")):
        (one,) = cluster(config, name)["load_assignment"]["endpoints"][0]["lb_endpoints"]
        assert one["endpoint"]["address"]["socket_address"]["address"] == address
    logs = [
        log["typed_config"]["common_config"]["grpc_service"] for log in http_manager(config)["access_log"]
    ]
    assert [log["envoy_grpc"]["cluster_name"] for log in logs] == ["warmroute-log-1", "warmroute-log-2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"envoy_version": (1, 20)}, "1.20 is not supported: choose one of 1.36"),
        ({"routers": ()}, "no router address"),
        ({"workers": StaticWorkers(())}, "no worker endpoint"),
        ({"routed_prefixes": ()}, "no routed path"),
        ({"listen_port": 70_000}, "70000, 9901"),
        ({"body_limit": 0}, "body_limit"),
        ({"retries": -1}, "retries"),
        ({"trace_percent": 101.0}, "trace_percent"),
        ({"response_limit": 1 << 32}, "response_limit"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_to_do(changes, message):
    with pytest.raises(EnvoyConfigError, match=message):
        EnvoySettings(**{"workers": WORKERS, **changes})


def test_a_bad_address_is_named():
    with pytest.raises(AddressError, match="no-port"):
        bootstrap(EnvoySettings(workers=StaticWorkers(("no-port",))))


@pytest.mark.parametrize(
    ("text", "version"), [("1.40", (1, 40)), ("v1.36.4", (1, 36)), (" 1.38.0 ", (1, 38))]
)
def test_versions_are_read(text, version):
    assert eb.parse_version(text) == version


@pytest.mark.parametrize("text", ["", "1", "2.0", "1.35", "latest", "1.40-dev"])
def test_other_versions_are_refused(text):
    with pytest.raises(EnvoyConfigError, match="choose one of"):
        eb.parse_version(text)


def test_a_missing_package_is_explained():
    program = (
        "import sys; sys.modules['envoy_data_plane'] = None\n"
        "from extproc.adapters import envoy_bootstrap as eb\n"
        "try: eb.bootstrap(eb.EnvoySettings(workers=eb.StaticWorkers(('1.1.1.1:1',))))\n"
        "except eb.EnvoyConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'warmroute[envoy]'" in done.stdout


def test_the_workers_file_is_replaced_whole(tmp_path):
    path = tmp_path / "workers.yaml"
    eb.write_workers_file(path, ["10.0.0.1:8000"])
    inode = path.stat().st_ino
    eb.write_workers_file(path, ["10.0.0.2:8000", "[fd00::1]:8000"])
    assert path.stat().st_ino != inode
    assert [one.name for one in tmp_path.iterdir()] == ["workers.yaml"]
    assignment = yaml.safe_load(path.read_text())["resources"][0]
    assert assignment["cluster_name"] == "workers"
    addresses = [one["address"] for one in walk(assignment) if isinstance(one, dict) and "port_value" in one]
    assert addresses == ["10.0.0.2", "fd00::1"]


# Kinds of workers take turns: they touch nothing the other settings touch.
KINDS = itertools.cycle((WORKERS, EdsFileWorkers("workers.yaml"), DnsWorkers("localhost", 8000)))
VARIANTS = [
    EnvoySettings(
        workers=kind,
        envoy_version=version,
        body_mode=mode,
        first_token_observer=observer,
        trace_collector="localhost:4317" if observer else None,
    )
    for (version, mode, observer), kind in zip(
        itertools.product(((1, 36), (1, 37), (1, 38)), BodyMode, (False, True)), KINDS, strict=False
    )
]


VARIANTS += [
    EnvoySettings(
        workers=eb.StaticWorkers(("10.0.0.1:8000", "10.0.0.2:8000")),
        pools=tuple(eb.PoolWorkers(f"pool {n}", eb.StaticWorkers((f"10.0.0.{n}:8000",))) for n in (1, 2)),
        named_only=True,
        fail_open=False,
        forwarded_namespaces=("envoy.filters.http.jwt_authn",),
        request_attributes=("connection.uri_san_peer_certificate",),
        routed_prefixes=("/",),
        envoy_version=version,
        body_mode=mode,
    )
    for version in ((1, 36), (1, 40))
    for mode in BodyMode
]


@pytest.mark.envoy
def test_envoy_accepts_every_variant(tmp_path):
    binary = require_envoy()
    eb.write_workers_file(tmp_path / "workers.yaml", ["10.0.0.1:8000"])
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    version = eb.parse_version(re.search(r"/(\d+\.\d+\.\d+)", said)[1])
    texts = {eb.to_yaml(bootstrap(one)) for one in VARIANTS if one.envoy_version <= version}
    for number, text in enumerate(sorted(texts)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        done = subprocess.run(
            [binary, "--mode", "validate", "-c", path, "--disable-hot-restart"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]


def test_requests_lead_to_the_cluster_of_their_pool_and_no_retry_out_of_it():
    config = bootstrap(VARIANTS[-1])
    names = [cluster["name"] for cluster in config["static_resources"]["clusters"]]
    ours = [
        "workers/pool 1#named",
        "workers/pool 2#named",
        "workers#named",
        "workers/pool 1",
        "workers/pool 2",
    ]
    assert names == [*ours, "workers", "warmroute"]
    manager = http_manager(config)
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    routed = [route for route in routes if route["match"].get("prefix") == "/"]
    assert [route["route"]["cluster"] for route in routed] == [*ours, "workers"]
    wanted = {h["name"]: h["string_match"]["exact"] for h in routed[0]["match"]["headers"]}
    assert wanted == {"x-warmroute-pool": "pool 1", "x-warmroute-workers": "named"}
    assert "headers" not in routed[-1]["match"]
    removed = str(manager["early_header_mutation_extensions"])
    assert "x-warmroute-pool" in removed
    assert "x-warmroute-workers" in removed
    filters = {one["name"]: one["typed_config"] for one in manager["http_filters"]}
    processor = filters["envoy.filters.http.ext_proc"]
    assert not processor.get("failure_mode_allow")
    assert "envoy.filters.http.jwt_authn" in processor["metadata_options"]["forwarding_namespaces"]["untyped"]
    assert processor["request_attributes"] == ["connection.uri_san_peer_certificate"]
    named = str(config["static_resources"]["clusters"][0]["load_balancing_policy"])
    assert "load_balancing_policies.subset" in named
    # Nobody but the router chooses there.
    watched = [one["name"] for one in config["static_resources"]["clusters"] if "outlier_detection" in one]
    assert watched == ["workers/pool 1", "workers/pool 2", "workers"]


def test_no_setting_may_let_clients_choose_a_pool():
    with pytest.raises(eb.EnvoyConfigError, match="x-warmroute-pool"):
        EnvoySettings(
            workers=eb.StaticWorkers(("10.0.0.1:1",)), internal_headers=("x-gateway-destination-endpoint",)
        )
