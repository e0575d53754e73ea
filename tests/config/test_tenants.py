from pathlib import Path

import pytest

from extproc.config import ConfigError, book_of, load, parse
from extproc.core.tenancy import EVERYTHING, Isolation
from extproc.protocol.tenant_identity import JWT_NAMESPACE, FromAttribute, FromHeader, FromMetadata

POOLS = """
pools:
  - {name: a, discovery: {static: ['h:1']}}
"""


def tenants(text):
    return parse(POOLS + f"tenants: {text}").tenants


def error_of(text):
    with pytest.raises(ConfigError) as caught:
        tenants(text)
    return str(caught.value)


def test_where_a_name_comes_from():
    found = tenants(
        "{identity: [{header: X-Tenant}, {metadata: {namespace: n, path: [a, b]}},"
        " {jwt: {payload: p, claim: [org, id]}}, {attribute: source.address}]}"
    )
    assert found.sources() == (
        FromHeader("x-tenant"),
        FromMetadata("n", ("a", "b")),
        FromMetadata(JWT_NAMESPACE, ("p", "org", "id")),
        FromAttribute("source.address"),
    )


def test_what_a_tenant_may_do():
    book = tenants(
        "{identity: [{header: t}], policies: {acme: {pools: [a], workers: ['[FD00::1]:80', 10.0.0.1],"
        " weight: 2, cold_quota: 0.5}}}"
    ).book()
    policy = book.policy("acme")
    assert policy.pools == {"a"}
    assert policy.workers == {"[fd00::1]:80", "10.0.0.1"}
    assert (policy.weight, policy.cold_quota, policy.isolation) == (2.0, 0.5, Isolation.SHARED)
    assert book.policy("other") is None


def test_without_tenants_everyone_may_use_everything():
    assert book_of(None) is EVERYTHING


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{identity: []}", "tenants.identity"),
        ("{identity: [{}]}", "tenants.identity.0: name exactly one of `header`"),
        ("{identity: [{header: a, attribute: b}]}", "tenants.identity.0: name exactly one of `header`"),
        ("{identity: [{jwt: {payload: p, claim: []}}]}", "tenants.identity.0.jwt.claim"),
        ("{identity: [{header: t}], policies: {x: {workers: [host]}}}", "'host' is not a worker"),
        ("{identity: [{header: t}], policies: {x: {workers: ['host:80']}}}", "write `ip:port` or `ip`"),
        ("{identity: [{header: t}], policies: {x: {isolation: none}}}", "tenants.policies.x.isolation"),
        ("{identity: [{header: t}], salt_key: {}}", "tenants.salt_key: name exactly one of `file` and `env`"),
        ("{identity: [{header: t}], policies: {x: {weight: 0}}}", "tenants.policies.x.weight"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, expected):
    message = error_of(text)
    assert "line 4" in message
    assert expected in message


def test_the_commented_example_is_a_configuration(monkeypatch):
    monkeypatch.setenv("WARMROUTE_SALT_KEY", "k" * 32)
    config = load(Path(__file__).parents[2] / "deploy" / "tenants.yaml")
    assert config.fail_closed
    assert config.tenants.book().salted
    assert set(config.tenants.policies) == {"acme", "hobby", "pinned"}
