from hypothesis import given
from hypothesis import strategies as st

from extproc.core.namespace import LONGEST_SALT, Namespace, RoutingNamespace, brief_salt

names = st.text(max_size=6)
optional = st.none() | names
namespaces = st.builds(Namespace, names, names, optional, optional)


@given(namespaces, namespaces)
def test_seeds_are_equal_exactly_when_namespaces_are(a, b):
    assert (a.seed == b.seed) == (a == b)


def test_an_adapter_is_not_a_salt_of_the_same_name():
    assert Namespace("m", "t", adapter="x").seed != Namespace("m", "t", cache_salt="x").seed


def test_an_empty_salt_is_not_a_missing_salt():
    assert Namespace("m", "t", cache_salt="").seed != Namespace("m", "t").seed


def test_fields_cannot_run_into_each_other():
    assert Namespace("ab", "c").seed != Namespace("a", "bc").seed


routing = st.builds(RoutingNamespace, namespaces, names, names, names)


@given(routing, routing)
def test_routing_keys_are_equal_exactly_when_namespaces_are(a, b):
    assert (a.key == b.key) == (a == b)
    assert len(a.key) == 16


def test_a_long_salt_is_told_apart_by_a_few_characters():
    usual, long = "s" * LONGEST_SALT, "s" * (LONGEST_SALT + 1)
    assert brief_salt(usual) == usual
    alike = {brief_salt(one) for one in (usual, long, f"{long}s", "t" * len(long), f"{usual}\ud800")}
    assert len(alike) == 5
    assert brief_salt(long) == brief_salt("".join(list(long)))
    assert all(len(one) <= LONGEST_SALT for one in alike)
