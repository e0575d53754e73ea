import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.admission import Admission, Destination, RefusedError, Visitor
from extproc.core.model_catalog import ModelCatalog
from extproc.core.salting import Salter
from extproc.core.tenancy import Isolation, TenantBook, TenantPolicy
from extproc.core.types import WorkerId
from extproc.protocol.tenant_identity import FromHeader
from tests.support.requests import http

SALTER = Salter(b"k" * 32)
SALTED = TenantPolicy(isolation=Isolation.SALTED)
SHARED = TenantPolicy()
BOOK = TenantBook(
    {
        "one": TenantPolicy(pools=frozenset({"a"})),
        "two": TenantPolicy(workers=frozenset({"10.0.0.2"})),
        "apart": SALTED,
    }
)


def admission(aliases=None, unknown=False):
    catalog = ModelCatalog({"a": ["llama"], "b": ["qwen"]}, aliases or {}, unknown)
    return Admission(catalog, BOOK, [FromHeader("x-tenant")], SALTER)


def visitor(tenant="one"):
    return admission().visitor(http(headers={"x-tenant": tenant}))


def refusal(function, *args):
    with pytest.raises(RefusedError) as caught:
        function(*args)
    return caught.value.reject


@pytest.mark.parametrize("headers", [{}, {"x-tenant": "nobody"}, {"x-tenant": "one, two"}, {"tenant": "one"}])
def test_who_has_no_policy_may_use_nothing(headers):
    reject = refusal(admission().visitor, http({"tenant": "one", "user": "one"}, headers=headers))
    assert (reject.status, json.loads(reject.body)["error"]["code"]) == (403, "permission_denied")


def test_a_tenant_gets_the_first_pool_it_may_use():
    catalog = ModelCatalog({"b": ["m"], "a": ["m"]})
    found = Admission(catalog, BOOK, salter=SALTER).destination(visitor("one"), "m")
    assert found == Destination("a", "m")


def test_a_pool_it_may_not_use_is_a_403_also_by_an_alias():
    ask = admission({"best": "qwen"}).destination
    for model in ("qwen", "best"):
        assert refusal(ask, visitor("one"), model).status == 403
    assert ask(visitor("one"), "llama").pool == "a"
    assert ask(visitor("one"), None).pool == "a"
    assert ask(visitor("two"), "best") == Destination("b", "qwen", "best")
    none = Visitor("x", TenantPolicy(pools=frozenset()))
    assert refusal(ask, none, None).status == 403


def test_an_unknown_model_is_a_404_in_openais_shape():
    strict = admission(unknown=True)
    strict.catalog.on_models("e:1", "a", ["llama"], [])
    strict.catalog.on_models("e:2", "b", ["qwen"], [])
    reject = refusal(strict.destination, visitor("one"), "gpt")
    assert reject.status == 404
    assert json.loads(reject.body)["error"]["code"] == "model_not_found"


def test_only_workers_it_may_use_are_candidates_whatever_the_gateway_says():
    members = [WorkerId("10.0.0.1:80"), WorkerId("10.0.0.2:80"), WorkerId("10.0.0.2:81")]
    ask = admission().workers
    assert ask(visitor("one"), members, None) is None
    assert ask(visitor("two"), members, None) == {"10.0.0.2:80", "10.0.0.2:81"}
    assert ask(visitor("two"), members, frozenset({"10.0.0.1:80"})) == frozenset()
    assert refusal(ask, visitor("two"), members[:1], None).status == 403
    assert ask(visitor("two"), [], None) == frozenset()  # none has been found yet: a matter of readiness


ANY = Destination("a", "llama")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["cache_salt", "model", "a", "é"]), JSON, max_size=4), st.data())
def test_a_salt_is_the_only_change(fields, data):
    raw = json.dumps(fields, indent=data.draw(st.sampled_from([None, 1]))).encode()
    goes_on = admission().body(Visitor("apart", SALTED), ANY, http(raw), None)
    sent = fields.get("cache_salt")
    expected = SALTER.salt("apart", sent if isinstance(sent, str) and sent else None)
    assert goes_on.salt == expected
    assert json.loads(goes_on.body) == {**fields, "cache_salt": expected}
    if "cache_salt" not in fields:
        added = b'"cache_salt":"%b"' % expected.encode()
        assert goes_on.body.replace(b"," + added, b"").replace(added, b"") == raw


def test_an_alias_and_a_salt_change_one_body_at_once():
    raw = b'{ "model": "best", "n": 12345678901234567890123 }'
    goes_on = admission().body(Visitor("apart", SALTED), Destination("b", "qwen", "best"), http(raw), None)
    salt = SALTER.salt("apart")
    assert (
        goes_on.body == b'{ "model": "qwen", "n": 12345678901234567890123,"cache_salt":"%b" }' % salt.encode()
    )
    assert goes_on.salt == salt


def test_what_was_normalized_is_what_is_changed():
    where = Destination("b", "qwen", "best")
    goes_on = admission().body(Visitor("one", SHARED), where, http(b"{}"), b'{"model":"best"}')
    assert goes_on.body == b'{"model":"qwen"}'
    assert admission().body(Visitor("one", SHARED), ANY, http(b"{}"), b"[]").body == b"[]"
    assert admission().body(Visitor("one", SHARED), ANY, http(b"{}"), None).body is None


CANNOT_CHANGE = [
    http(b'{"model" "best"}', path="/invocations"),
    http(b"[]"),
    http(b"--boundary\r\n"),
    http(b'{"a":1', path="/v1/audio/transcriptions"),
    http('{"model":"best"}'.encode("utf-16")),
    http(b"\x1f\x8b", headers={"content-encoding": "gzip"}),
]


@pytest.mark.parametrize("request_", CANNOT_CHANGE)
def test_what_cannot_be_salted_is_refused(request_):
    assert refusal(admission().body, Visitor("apart", SALTED), ANY, request_, None).status == 415


@pytest.mark.parametrize("request_", CANNOT_CHANGE)
def test_an_alias_that_cannot_be_replaced_is_left_to_the_engine(request_):
    where = Destination("b", "qwen", "best")
    assert admission().body(Visitor("one", SHARED), where, request_, None).body is None


def test_a_body_that_is_not_shown_cannot_be_salted_and_no_body_need_not():
    apart = Visitor("apart", SALTED)
    assert refusal(admission().body, apart, ANY, http(b"", body_seen=False), None).status == 503
    assert admission().body(apart, ANY, http(b"", method="GET"), None).body is None


def test_salted_tenants_need_a_key():
    with pytest.raises(ValueError, match="no key"):
        Admission(ModelCatalog({}), BOOK)
