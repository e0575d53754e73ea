import typing

import pytest

from extproc.config import Config, ConfigError, load, loading, parse
from extproc.config.base import Section
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
        ("pools: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("seed: !!int ''", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        (MINIMAL + "seed: 1\npools: []\n", "line 6: pools: set twice, first in line 2"),
        ("pools: [{discovery: {static: [a:1], file: x, static: [b:1]}}]", "static: set twice"),
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


def paths_of(section, name=""):
    """(section, setting) of everything that is a path."""
    for field, info in section.model_fields.items():
        annotation = str(info.annotation)
        if "pathlib.Path" in annotation:
            yield name, field
    for field, info in section.model_fields.items():
        for inner in sections_in(info.annotation):
            yield from paths_of(inner, field)


def sections_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in typing.get_args(annotation):
        yield from sections_in(part)


def test_every_path_is_relative_to_the_file_but_those_that_envoy_reads():
    relative = loading._PATH_FIELDS
    found = set(paths_of(Config))
    assert {("peers", "token_file"), ("tls", "ca"), ("snapshot", "path")} <= found
    assert {path for path in found if path[0] != "router_tls"} <= relative
    assert not {path for path in relative if path[0] == "router_tls"}


@pytest.mark.parametrize(("written", "meant"), [("d.jsonl", "{}/d.jsonl"), ("-", "-"), ("", "")])
def test_the_decision_log_is_beside_the_file_unless_it_is_none(tmp_path, written, meant):
    path = tmp_path / "warmroute.yaml"
    path.write_text(f"{MINIMAL}\ndecision_log: {{path: '{written}'}}\n")
    assert load(path).decision_log.path == meant.format(tmp_path)


def test_what_yaml_merges_is_not_set_twice():
    config = parse("pools:\n- &a {name: a, discovery: {static: [a:1]}}\n- {<<: *a, name: b}\n")
    assert [pool.name for pool in config.pools] == ["a", "b"]


def test_a_file_that_holds_itself_is_refused(tmp_path):
    path = tmp_path / "warmroute.yaml"
    path.write_text("pools: &a [*a]")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(path)


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    path = tmp_path / "warmroute.yaml"
    path.write_bytes(b"pools: \xff")
    with pytest.raises(ConfigError, match="not UTF-8: byte 7"):
        load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none.yaml")


def test_the_index_has_a_ceiling_that_can_be_set_or_taken_away(tmp_path):
    path = tmp_path / "warmroute.yaml"
    pool = "pools: [{discovery: {file: workers.yaml}}]"
    path.write_text(pool)
    assert load(path).router_settings().max_index_blocks == 8_000_000
    path.write_text(f"{pool}\nlimits: {{index_blocks: 0}}")
    assert load(path).router_settings().max_index_blocks == 0


def test_the_first_rank_of_a_pool_and_of_one_worker():
    config = parse(
        "pools: [{dp_start_rank: 2, discovery: {static: ['h:1', {endpoint: 'h:2', dp_start_rank: 4}]}}]"
    )
    pool = config.pools[0]
    assert (pool.dp_start_rank, [one.dp_start_rank for one in pool.discovery.static]) == (2, [None, 4])
    with pytest.raises(ConfigError, match="dp_start_rank"):
        parse("pools: [{dp_start_rank: -1, discovery: {static: ['h:1']}}]")
