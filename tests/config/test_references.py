import textwrap

import pytest

from extproc.assembly import engine_keys
from extproc.config import ConfigError, load, parse


def error_of(text):
    with pytest.raises(ConfigError) as caught:
        parse(text, "warmroute.yaml")
    return str(caught.value)


def test_pool_names_must_differ():
    pool = "{name: a, discovery: {static: ['h:1']}}"
    assert "pool names must differ" in error_of(f"pools: [{pool}, {pool}]")


def test_a_model_belongs_to_one_pool():
    one = "{name: a, model: {names: [m]}, discovery: {static: ['h:1']}}"
    two = "{name: b, model: {names: [m]}, discovery: {static: ['h:2']}}"
    assert "model 'm' is in two pools: a and b" in error_of(f"pools: [{one}, {two}]")


POOLS = """
pools:
  - {name: a, model: {names: [m]}, discovery: {static: ['h:1']}}
  - {name: b, model: {names: [n]}, discovery: {static: ['h:2']}}
"""


def error_in(section):
    return error_of(POOLS + textwrap.dedent(section))


def test_one_model_in_two_pools_is_meant_where_tenants_choose_between_them():
    text = POOLS.replace("[n]", "[m]")
    assert "line 4: pools.1.model.names.0: model 'm' is in two pools" in error_of(text)
    parse(text + "tenants: {identity: [{header: x-tenant}]}")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "aliases:\n  x: y\n  y: x\n",
            "line 6: aliases.x: aliases go round in a circle: x -> y -> x; let one of them name a model",
        ),
        ("aliases:\n  m: n\n", "line 6: aliases.m: pool a serves a model of this name"),
        (
            """\
            tenants:
              identity: [{header: x-tenant}]
              policies:
                acme: {pools: [a]}
                evil:
                  pools:
                    - a
                    - c
            """,
            "line 12: tenants.policies.evil.pools.1: there is no pool 'c'; choose from a, b",
        ),
        (
            "tenants:\n  identity: [{header: x}]\n  unknown:\n    pools: [z]\n",
            "line 8: tenants.unknown.pools.0: there is no pool 'z'",
        ),
        (
            "tenants:\n  identity: [{header: x}]\n  unknown:\n    isolation: salted\n",
            "line 8: tenants.unknown.isolation: salts need a secret key",
        ),
        (
            """\
            tenants:
              identity: [{header: x}]
              unknown:
                workers: [10.0.0.1]
            rollout: {mode: observe}
            """,
            "line 8: tenants.unknown.workers: in mode observe Envoy chooses the worker",
        ),
        (
            "rollout:\n  classes:\n    - {name: c, pools: [z]}\n",
            "line 7: rollout.classes.0.pools.0: there is no pool 'z'",
        ),
        (
            "rollout:\n  classes:\n    - {name: c, tenants: [t]}\n",
            "line 7: rollout.classes.0.tenants: no tenants are configured",
        ),
        (
            "rollout:\n  classes:\n    - {name: c}\n    - {name: c}\n",
            "line 8: rollout.classes.1.name: there are two traffic classes 'c'",
        ),
    ],
)
def test_names_that_lead_nowhere_are_refused_with_line_and_fix(section, expected):
    assert expected in error_in(section)


def test_a_revision_is_described_once():
    text = (
        "pools:\n  - model:\n      revision: a\n      revisions:\n        - revision: a\n"
        "    discovery: {static: ['h:1']}"
    )
    assert "line 5: pools.0.model.revisions.0.revision: revision 'a' is described already" in error_of(text)


SALTED = """
tenants:
  identity: [{header: x-tenant}]
  salt_key: {%s}
  unknown: {isolation: salted}
"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "cannot read the key from"), (b"short-secret\n", "the key has 12 bytes; at least 32 are needed")],
)
def test_a_bad_key_file_is_refused_with_line_and_fix_and_never_shown(tmp_path, content, expected):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    message = error_of(POOLS + SALTED % f"file: {path}")
    assert f"line 8: tenants.salt_key: {expected}" in message
    assert "openssl rand -hex 32" in message
    assert "short-secret" not in message


def test_a_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("WARMROUTE_TEST_KEY", raising=False)
    text = POOLS + SALTED % "env: WARMROUTE_TEST_KEY"
    assert "line 8: tenants.salt_key: the environment variable WARMROUTE_TEST_KEY is not set" in error_of(
        text
    )
    parse(text, secrets=False)
    monkeypatch.setenv("WARMROUTE_TEST_KEY", "k" * 32 + "\n")
    assert parse(text).tenants.salt_key.salter().key == b"k" * 32


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "listen: 'h:65534'\nprocesses: 2\n",
            "line 5: listen: with 2 processes, ports up to 65536 are needed",
        ),
        ("admin: {listen: 'h:65535'}\nprocesses: 2\n", "line 5: admin.listen: with 2 processes"),
        ("peers: {listen: 'h:65535'}\nprocesses: 2\n", "peers.listen: with 2 processes, ports up to 65536"),
    ],
)
def test_every_process_must_have_its_ports(section, expected):
    assert expected in error_in(section)
    parse(POOLS + section.replace("processes: 2", "processes: 1"))


def test_every_rank_must_have_its_addresses():
    pool = "{dp_size: %d, discovery: {static: [{endpoint: 'h:1', kv_replay: 'ipc:///r'}]}}"
    assert "static.0.kv_replay: ipc:///r: an ipc address cannot serve several ranks" in error_of(
        f"pools: [{pool % 2}]"
    )
    parse(f"pools: [{pool % 1}]")
    pool = "{dp_size: 2, kv_events: {enabled: %s, endpoint: 'tcp://*:65535'}, discovery: {static: ['h:1']}}"
    assert "kv_events.endpoint: tcp://*:65535: rank 1 would have port 65536" in error_of(
        f"pools: [{pool % 'true'}]"
    )
    parse(f"pools: [{pool % 'false'}]")


@pytest.mark.parametrize("start", ["dp_start_rank: 9, discovery: {static: ['h:1']}", "STATIC"])
def test_ports_are_those_of_ranks_from_the_first_on(start):
    start = start.replace(
        "STATIC", "discovery: {static: [{endpoint: 'h:1', kv_events: E, dp_start_rank: 9}]}"
    )
    pool = f"{{dp_size: 2, kv_events: {{endpoint: E}}, {start}}}"
    assert "rank 10 would have port 65536" in error_of(f"pools: [{pool.replace('E', 'tcp://h:65526')}]")
    parse(f"pools: [{pool.replace('E', 'tcp://h:65525')}]")


KEYED = "pools:\n  - discovery: {static: ['h:1']}\n    api_key_file: %s\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read {}: No such file or directory"),
        ("\n", "{} is empty"),
        ("a-secret\nanother", "{} holds no key"),
    ],
)
def test_an_engines_key_that_cannot_be_used_is_refused_with_line_and_fix_and_never_shown(
    tmp_path, content, expected
):
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    message = error_of(KEYED % path)
    assert f"line 3: pools.0.api_key_file: {expected.format(path)}" in message
    assert "a-secret" not in message
    config = parse(KEYED % path, secrets=False)
    with pytest.raises(ConfigError, match="pool default: api_key_file: "):
        engine_keys(config)


def test_engine_keys_are_those_of_their_pools(tmp_path):
    (tmp_path / "key").write_text("a-secret\n")
    file = tmp_path / "warmroute.yaml"
    file.write_text(KEYED % "key" + "  - {name: other, discovery: {static: ['h:2']}}\n")
    config = load(file)  # relative to the file
    keys = engine_keys(config)
    assert list(keys) == ["default"]
    assert keys["default"].headers("/v1/models") == {"Authorization": "Bearer a-secret"}
    assert "a-secret" not in repr(config) + config.model_dump_json()
