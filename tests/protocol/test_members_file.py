import contextlib
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.envoy_bootstrap import workers_file
from extproc.core.errors import ProtocolError
from extproc.core.types import Member
from extproc.protocol.members_file import parse_members

TEMPLATE = Member("", pool="chat", kv_events="tcp://*:5557")


def member(endpoint, **changes):
    return Member(**{"endpoint": endpoint, "pool": "chat", "kv_events": "tcp://*:5557", **changes})


@pytest.mark.parametrize(
    "text",
    [
        "- 10.0.0.1:8000\n- {endpoint: 'worker-2:8000', dp_size: 2, kv_events: null}\n",
        "workers:\n- 10.0.0.1:8000\n- endpoint: worker-2:8000\n  dp_size: 2\n  kv_events: null\n",
        '["10.0.0.1:8000", {"endpoint": "worker-2:8000", "dp_size": 2, "kv_events": null}]',
    ],
)
def test_our_form(text):
    assert parse_members(text, TEMPLATE) == (
        member("10.0.0.1:8000"),
        member("worker-2:8000", dp_size=2, kv_events=None),
    )


@pytest.mark.parametrize("dump", [yaml.safe_dump, json.dumps])
def test_the_file_written_for_envoy(dump):
    endpoints = ["10.0.0.1:8000", "[fd00::1]:8000"]
    assert parse_members(dump(workers_file(endpoints)), TEMPLATE) == tuple(map(member, endpoints))


CAMEL = """
version_info: "7"
resources:
- "@type": type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment
  clusterName: workers
  endpoints:
  - locality: {zone: a}
    lbEndpoints:
    - endpoint: {address: {socketAddress: {address: 10.0.0.1, portValue: 8000}}}
      metadata: {filterMetadata: {warmroute: {dp_size: 2.0, kv_replay: "tcp://*:5558"}, other: {x: 1}}}
    - endpoint: {address: {socketAddress: {address: 10.0.0.2, portValue: 8000}}}
      healthStatus: DRAINING
  - lbEndpoints:
    - endpoint: {address: {socketAddress: {address: 10.0.0.3, portValue: 8000}}}
      healthStatus: HEALTHY
- clusterName: elsewhere
  endpoints:
  - lbEndpoints:
    - endpoint: {address: {socketAddress: {address: 10.9.9.9, portValue: 1}}}
- clusterName: nothing
"""


def test_envoys_form_with_json_names_metadata_and_health():
    first = member("10.0.0.1:8000", dp_size=2, kv_replay="tcp://*:5558")
    assert parse_members(CAMEL, TEMPLATE, "workers") == (first, member("10.0.0.3:8000"))
    assert [one.endpoint for one in parse_members(CAMEL, TEMPLATE)][-1] == "10.9.9.9:1"


def test_a_bare_load_assignment():
    assignment = {
        key: value for key, value in workers_file(["10.0.0.1:1"])["resources"][0].items() if key != "@type"
    }
    assert parse_members(json.dumps(assignment), TEMPLATE) == (member("10.0.0.1:1"),)


@pytest.mark.parametrize(
    "text", ["[]", "workers: []", "resources: []", "{cluster_name: workers, endpoints: []}"]
)
def test_a_list_may_be_empty(text):
    assert parse_members(text, TEMPLATE) == ()


def test_a_repeated_entry_counts_once_unless_it_contradicts():
    assert parse_members("[a:1, A:1]", TEMPLATE) == (member("a:1"),)
    with pytest.raises(ProtocolError, match="a:1 is listed twice"):
        parse_members("[a:1, {endpoint: a:1, dp_size: 2}]", TEMPLATE)


def lb_endpoint(address, metadata="{}", health="HEALTHY"):
    """An Envoy file of one endpoint."""
    return (
        f"endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {address}}}}},"
        f" health_status: {health}, metadata: {{filter_metadata: {{warmroute: {metadata}}}}}}}]}}]"
    )


def test_a_health_status_that_is_none_is_no_reason_to_leave_a_worker_out():
    text = lb_endpoint("{address: 10.0.0.1, port_value: 8000}", health="[odd]")
    assert parse_members(text, TEMPLATE) == (member("10.0.0.1:8000"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no list of workers"),
        ("- [", "not valid YAML"),
        ("hello", "no list of workers"),
        ("{hosts: []}", "no list of workers"),
        ("[7]", "7 is not a worker"),
        ("[{dp_size: 1}]", "is not a worker"),
        ("[10.0.0.1]", "10.0.0.1"),
        ("[{endpoint: a:1, dp_sice: 2}]", "no field 'dp_sice'"),
        ("[{endpoint: a:1, dp_size: many}]", "dp_size must be int"),
        ("[{endpoint: a:1, dp_size: true}]", "dp_size must be int"),
        ("[{endpoint: a:1, dp_size: 0}]", "dp_size must be at least 1"),
        ("[{endpoint: a:1, dp_start_rank: -1}]", "dp_start_rank must be at least 0"),
        ("[{endpoint: a:1, dp_start_rank: third}]", "dp_start_rank must be int"),
        ("[{endpoint: a:1, pool: null}]", "pool must be str"),
        ("[{endpoint: a:1, revision: 2024-13-45}]", "not valid YAML or JSON: month must be in 1..12"),
        ("[{endpoint: a:1, dp_size: !!int ''}]", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("[" * 1000 + "]" * 1000, "nested too deeply"),
        (lb_endpoint("{address: 10.0.0.1, port_value: 80}", "{dp_size: .nan}"), "dp_size must be int"),
        (lb_endpoint("{address: 10.0.0.1, port_value: 80}", "{dp_size: .inf}"), "dp_size must be int"),
        (lb_endpoint("{address: 10.0.0.1, port_value: 80}", "{dp_size: 1.5}"), "dp_size must be int"),
        (lb_endpoint("{address: {a: b}, port_value: 80}"), "no socket address"),
        (lb_endpoint("{address: 7, port_value: 80}"), "no socket address"),
        ("resources: [7]", "must be a mapping"),
        ("resources: [{cluster_name: w, endpoints: [7]}]", "lb_endpoints"),
        ("resources: [{cluster_name: w, endpoints: [{lb_endpoints: [{}]}]}]", "no socket address"),
        (
            (
                "resources: [{endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: "
                "{address: a, port_value: 1}}}, metadata: {filter_metadata: {warmroute: x}}}]}]}]"
            ),
            "must be a mapping",
        ),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ProtocolError, match=message):
        parse_members(text, TEMPLATE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["endpoint", "endpoints", "lb_endpoints", "address", "workers", "resources", "metadata"]
            ),
            inner,
            max_size=3,
        )
    ),
)


@given(json_values)
def test_any_document_gives_members_or_a_protocol_error(document):
    with contextlib.suppress(ProtocolError):
        assert all(isinstance(one, Member) for one in parse_members(json.dumps(document), TEMPLATE))


@given(st.text())
def test_any_text_gives_members_or_a_protocol_error(text):
    with contextlib.suppress(ProtocolError):
        parse_members(text, TEMPLATE)


def test_workers_of_the_cold_pool_are_marked_in_either_form():
    ours = "[10.0.0.1:8000, {endpoint: '10.0.0.2:8000', cold: true}]"
    envoys = CAMEL.replace("dp_size: 2.0", "cold: true")
    assert [m.cold for m in parse_members(ours, TEMPLATE)] == [False, True]
    assert [m.cold for m in parse_members(envoys, TEMPLATE, "workers")] == [True, False]
    with pytest.raises(ProtocolError, match="cold must be bool"):
        parse_members("[{endpoint: '10.0.0.2:8000', cold: 1}]", TEMPLATE)


def test_a_worker_may_name_the_model_revision_it_serves():
    (one, two) = parse_members("- {endpoint: 'w:1', revision: v2}\n- w:2\n", Member("", revision="v1"))
    assert (one.revision, two.revision) == ("v2", "v1")


def test_the_first_rank_of_each():
    described = "[{endpoint: a:1, dp_size: 2, dp_start_rank: 2}, {endpoint: b:1, dp_start_rank: null}, c:1]"
    template = member("", dp_start_rank=4)
    assert [one.dp_start_rank for one in parse_members(described, template)] == [2, None, 4]
    envoys = CAMEL.replace("dp_size: 2.0", "dp_size: 2.0, dp_start_rank: 2.0")
    assert parse_members(envoys, TEMPLATE)[0].dp_start_rank == 2
