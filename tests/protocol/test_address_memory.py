import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.address_memory import AddressMemory, preferred

v4 = st.integers(1, 6).map(lambda number: f"10.0.0.{number}")
v6 = st.integers(1, 3).map(lambda number: f"fd00::{number}")
answers = st.lists(st.one_of(st.sets(v4), st.sets(v4 | v6)), max_size=20)


@given(answers, st.integers(1, 4))
def test_an_address_is_known_while_one_of_the_last_answers_had_it(history, drop_after):
    memory = AddressMemory(drop_after)
    for answer in history:
        memory.observe(answer)
    recent = [preferred(answer) for answer in history[-drop_after:]]
    assert set(memory.addresses) == set().union(*recent)


@given(st.sets(v4, min_size=1), st.sets(v6))
def test_of_mixed_families_only_ipv4_counts_as_in_envoy(four, six):
    assert preferred([*six, *four]) == four
    assert preferred(six) == six


def test_order_is_numeric_and_independent_of_the_answer():
    memory = AddressMemory()
    memory.observe(["10.0.0.10", "10.0.0.9", "10.0.0.9"])
    assert memory.addresses == ("10.0.0.9", "10.0.0.10")


def test_what_is_not_an_address_is_refused():
    with pytest.raises(ValueError, match="not-an-ip"):
        AddressMemory().observe(["not-an-ip"])


def test_a_memory_that_never_remembers_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        AddressMemory(0)
