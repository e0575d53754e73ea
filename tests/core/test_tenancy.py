import pytest

from extproc.core.tenancy import EVERYTHING, Isolation, TenantBook, TenantPolicy
from extproc.core.types import WorkerId


def test_a_tenant_has_its_own_policy_and_others_the_unknown_ones():
    book = TenantBook({"acme": TenantPolicy(pools=frozenset({"a"}))}, TenantPolicy(pools=frozenset({"b"})))
    assert book.policy("acme").permits_pool("a")
    assert not book.policy("acme").permits_pool("b")
    assert book.policy("other").permits_pool("b")
    assert not book.policy("").permits_pool("a")


def test_without_a_policy_for_unknown_tenants_they_may_use_nothing():
    assert TenantBook({"acme": TenantPolicy()}).policy("other") is None


def test_workers_are_named_with_or_without_a_port():
    policy = TenantPolicy(workers=frozenset({"10.0.0.1:8000", "10.0.0.2", "fd00::1"}))
    allowed = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.2:9", "[fd00::1]:8000"]
    assert all(policy.permits(WorkerId(endpoint)) for endpoint in allowed)
    assert not any(policy.permits(WorkerId(endpoint)) for endpoint in ["10.0.0.1:8001", "10.0.0.3:8000"])
    assert TenantPolicy().permits(WorkerId("10.0.0.3:8000"))


@pytest.mark.parametrize(
    ("book", "restricted", "salted"),
    [
        (EVERYTHING, False, False),
        (TenantBook({"a": TenantPolicy(weight=2.0)}, TenantPolicy()), False, False),
        (TenantBook({"a": TenantPolicy()}), True, False),
        (TenantBook({"a": TenantPolicy(pools=frozenset())}, TenantPolicy()), True, False),
        (TenantBook({"a": TenantPolicy(workers=frozenset())}, TenantPolicy()), True, False),
        (TenantBook({}, TenantPolicy(isolation=Isolation.SALTED)), True, True),
    ],
)
def test_whether_a_promise_was_made(book, restricted, salted):
    assert (book.restricted, book.salted) == (restricted, salted)
