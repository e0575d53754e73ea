import pytest

from extproc.protocol.tenant_identity import (
    JWT_NAMESPACE,
    FromAttribute,
    FromHeader,
    FromMetadata,
    attribute_names,
    identify,
    namespaces,
)

HEADER = FromHeader("X-Tenant")
CLAIM = FromMetadata(JWT_NAMESPACE, ("payload", "org", "id"))
CERTIFICATE = FromAttribute("connection.uri_san_peer_certificate")


def claims(value):
    return {JWT_NAMESPACE: {"payload": {"org": {"id": value}}}}


def test_the_first_source_that_says_something_wins():
    sources = [CLAIM, HEADER, CERTIFICATE]
    attributes = {"connection.uri_san_peer_certificate": "spiffe://c"}
    assert identify(sources, {"x-tenant": "h"}, claims("j"), attributes) == "j"
    assert identify(sources, {"x-tenant": "h"}, {}, attributes) == "h"
    assert identify(sources, {}, {}, attributes) == "spiffe://c"
    assert identify(sources, {}, {}, {}) == ""
    assert identify([], {"x-tenant": "h"}, claims("j"), attributes) == ""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("acme", "acme"),
        ("  acme ", "acme"),
        (42.0, "42"),
        (7, "7"),
        *((nobody, "") for nobody in (1.5, True, None, [1], {"a": 1}, "", "x" * 257)),
        *((nobody, "") for nobody in (float("inf"), float("nan"))),
    ],
)
def test_what_a_claim_can_name(value, name):
    assert identify([CLAIM], {}, claims(value), {}) == name


@pytest.mark.parametrize(
    "metadata",
    [{}, {JWT_NAMESPACE: {}}, {JWT_NAMESPACE: {"payload": "text"}}, {JWT_NAMESPACE: {"payload": None}}],
)
def test_a_path_that_leads_nowhere_names_nobody(metadata):
    assert identify([CLAIM], {}, metadata, {}) == ""


def test_repeated_headers_are_no_name_of_either_value():
    assert identify([HEADER], {"x-tenant": "a, b"}, {}, {}) == "a, b"


def test_what_the_gateway_must_send():
    sources = [HEADER, CLAIM, FromMetadata(JWT_NAMESPACE, ("x",)), CERTIFICATE, CERTIFICATE]
    assert namespaces(sources) == (JWT_NAMESPACE,)
    assert attribute_names(sources) == ("connection.uri_san_peer_certificate",)


def test_a_name_that_a_terminal_would_obey_names_nobody():
    for name in ("acme\x1b[2J", "a\nb", "a\ud800"):
        assert identify([FromHeader("x-tenant")], {"x-tenant": name}, {}, {}) == ""
