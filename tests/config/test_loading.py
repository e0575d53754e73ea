import pytest

from extproc.config import ConfigError, load, parse
from extproc.core.cost import CostSettings

MINIMAL = """
pools:
  - discovery:
      static: [10.0.0.1:8000, 10.0.0.2:8000]
"""


def error_of(text):
    with pytest.raises(ConfigError) as caught:
        parse(text, "warmroute.yaml")
    return str(caught.value)


def test_a_minimal_file_has_sensible_defaults():
    config = parse(MINIMAL)
    assert [w.endpoint for w in config.pools[0].discovery.static] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert config.policy == "token-load"
    assert config.cost.settings() == CostSettings()
    assert config.limits.prompt_budget_ms / 1000 < config.envoy.message_timeout_s


def test_a_static_worker_may_name_its_own_kv_endpoints():
    config = parse("pools: [{discovery: {static: [{endpoint: 'h:1', kv_events: 'tcp://h:5', dp_size: 2}]}}]")
    worker = config.pools[0].discovery.static[0]
    assert (worker.kv_events, worker.dp_size) == ("tcp://h:5", 2)


def test_a_misspelled_setting_is_named_with_its_line():
    message = error_of(MINIMAL + "polcy: token-load\n")
    assert "line 5: polcy: no such setting" in message


def test_a_wrong_value_is_named_with_its_line_and_place():
    message = error_of(MINIMAL + "limits:\n  body_bytes: -5\n")
    assert "line 6: limits.body_bytes" in message
    assert "greater than 0" in message


def test_an_unknown_policy_lists_the_known_ones():
    message = error_of(MINIMAL + "policy: fastest\n")
    assert "line 5: policy" in message
    assert "token-load" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "must be a mapping"),
        ("pools: []", "line 1: pools"),
        ("policy: token-load", "pools: this setting is required"),
        ("pools: [{discovery: {}}]", "name at least one source of workers"),
        ("pools: [unclosed", "not valid YAML"),
        ("pools: [{discovery: {dns: {name: x, port: 99999}}}]", "pools.0.discovery.dns.port"),
    ],
)
def test_unusable_files_say_why(text, expected):
    assert expected in error_of(text)


def test_paths_are_relative_to_the_file(tmp_path):
    path = tmp_path / "etc" / "warmroute.yaml"
    path.parent.mkdir()
    path.write_text("pools: [{model: {path: ../models/m}, discovery: {file: workers.yaml}}]")
    pool = load(path).pools[0]
    assert pool.model.path == tmp_path / "models" / "m"
    assert pool.discovery.file == tmp_path / "etc" / "workers.yaml"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.yaml")
