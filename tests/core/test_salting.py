import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.salting import Salter

KEY = b"k" * 32
ANY = st.text("+-:1a", max_size=3) | st.text(max_size=12)  # the first could be taken for one another


@given(st.tuples(ANY, st.none() | ANY), st.tuples(ANY, st.none() | ANY))
def test_salts_are_equal_only_for_one_tenant_and_one_client_salt(one, other):
    salter = Salter(KEY)
    assert (salter.salt(*one) == salter.salt(*other)) == (one == other)


def test_a_tenants_name_cannot_run_into_a_salt():
    salter = Salter(KEY)
    assert salter.salt("a+") != salter.salt("a", "-")
    assert salter.salt("a", "b") != salter.salt("a+b")


def test_a_client_cannot_spell_another_tenants_salt():
    salter = Salter(KEY)
    wanted = {salter.salt("acme"), salter.salt("acme", "x")}
    sent = ["acme", "x", salter.salt("acme"), "4:acme-", "-", "", "+x"]
    assert wanted.isdisjoint(salter.salt("evil", salt) for salt in sent)


def test_salts_meet_the_engines_rules_and_depend_on_the_key():
    salt = Salter(KEY).salt("a/b@c\\d\0")
    assert len(salt) == 64
    assert set(salt) <= set("0123456789abcdef")
    assert salt == Salter(KEY).salt("a/b@c\\d\0")
    assert salt != Salter(b"K" * 32).salt("a/b@c\\d\0")


def test_a_short_key_is_refused_and_no_key_is_ever_shown():
    with pytest.raises(ValueError, match="31 bytes; at least 32") as caught:
        Salter(b"secret-secret-secret-secret-sec")
    assert "secret" not in str(caught.value)
    assert "kkk" not in repr(Salter(KEY))
