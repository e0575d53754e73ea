import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.rollout import Mode, Rollout, Traffic, TrafficClass

KEYS = [f"session {n}" for n in range(2_000)]


def traffic(key="k", **fields):
    return Traffic(fields.pop("headers", {}), **{"tenant": "t", "pool": "p", "model": "m", **fields}, key=key)


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({}, True),
        ({"header": "x-class"}, True),
        ({"header": "x-other"}, False),
        ({"header": "x-class", "values": frozenset({"batch", "chat"})}, True),
        ({"header": "x-class", "values": frozenset({"chat"})}, False),
        ({"tenants": frozenset({"t"}), "pools": frozenset({"p"}), "models": frozenset({"m"})}, True),
        ({"tenants": frozenset({"t"}), "pools": frozenset({"q"})}, False),
        ({"models": frozenset({"n"})}, False),
        ({"percent": 0.0}, False),
    ],
)
def test_a_class_takes_what_everything_it_names_matches(fields, taken):
    assert TrafficClass("c", **fields).takes(traffic(headers={"x-class": "batch"})) is taken


def test_the_first_class_that_takes_a_request_sets_its_mode():
    rollout = Rollout(
        Mode.OBSERVE,
        [
            TrafficClass("acme", Mode.ENFORCE, tenants=frozenset({"acme"})),
            TrafficClass("all", Mode.SHADOW, percent=50.0),
        ],
    )
    assert rollout.of(traffic(tenant="acme")) == (Mode.ENFORCE, "acme")
    found = {rollout.of(traffic(key)) for key in KEYS}
    assert found == {(Mode.SHADOW, "all"), (Mode.OBSERVE, "")}
    assert rollout.modes == {Mode.OBSERVE, Mode.SHADOW, Mode.ENFORCE}
    assert Rollout().of(traffic()) == (Mode.ENFORCE, "")


@given(st.floats(0, 100), st.floats(0, 100), st.text(max_size=20))
def test_a_session_stays_in_when_the_percentage_rises(one, other, key):
    low, high = sorted([one, other])
    if TrafficClass("c", percent=low).takes(traffic(key)):
        assert TrafficClass("c", percent=high).takes(traffic(key))


def test_a_percentage_is_that_share_of_sessions_and_differs_between_classes():
    def members(name):
        return {key for key in KEYS if TrafficClass(name, percent=25.0).takes(traffic(key))}

    assert 0.2 * len(KEYS) < len(members("a")) < 0.3 * len(KEYS)
    assert members("a") == members("a")
    assert members("a") != members("b")


def test_its_summary_names_the_classes_that_differ():
    classes = (TrafficClass("canary"), TrafficClass("rest", mode=Mode.SHADOW))
    assert Rollout(Mode.SHADOW, classes).summary == "shadow (canary: enforce)"
    assert Rollout().summary == "enforce"
