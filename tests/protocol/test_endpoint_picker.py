import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol import endpoint_picker as epp

SUBSET = "x-gateway-destination-endpoint-subset"


def hint(value) -> dict:
    return {"envoy.lb.subset_hint": {SUBSET: value}}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"envoy.lb.subset_hint": {}}, None),
        ({"envoy.lb.subset_hint": {"something-else": "x"}}, None),
        (hint(None), None),
        (hint(""), set()),
        (hint([]), set()),
        (hint(["", "  "]), set()),
        (hint(7.0), set()),
        (hint(["10.0.0.1:8000", "10.0.0.2:8000"]), {"10.0.0.1:8000", "10.0.0.2:8000"}),
        (hint("10.0.0.1:8000, ,10.0.0.2:8000,"), {"10.0.0.1:8000", "10.0.0.2:8000"}),
        (
            hint(["10.0.0.1:8000,10.0.0.2:8000", 5, "10.0.0.3"]),
            {"10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3"},
        ),
        (hint("[FD00::7]:8000,fd00:0::8"), {"[fd00::7]:8000", "fd00::8"}),
    ],
)
def test_subset_hint(metadata, expected):
    assert epp.subset_hint(metadata) == expected


def test_an_empty_hint_is_not_the_absence_of_a_hint():
    assert epp.match_subset(epp.subset_hint({}), ["a:1"]) is None
    assert epp.match_subset(epp.subset_hint(hint("")), ["a:1"]) == frozenset()


def test_an_entry_without_a_port_admits_all_ports_of_its_address():
    endpoints = ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.10:8000", "[fd00::7]:8000"]
    assert epp.match_subset(frozenset({"10.0.0.1"}), endpoints) == {"10.0.0.1:8000", "10.0.0.1:8001"}
    assert epp.match_subset(frozenset({"fd00::7", "10.0.0.10:8000"}), endpoints) == {
        "[fd00::7]:8000",
        "10.0.0.10:8000",
    }


def test_pitfall_81_header_and_metadata_carry_one_value_with_the_pick_first():
    endpoints = ["10.0.0.2:8000", "10.0.0.1:8000", "[fd00::7]:80"]
    value = epp.destination_value(endpoints)
    assert value == "10.0.0.2:8000,10.0.0.1:8000,[fd00::7]:80"
    assert epp.decision_metadata(endpoints, "lease")["envoy.lb"][epp.DESTINATION] == value
    assert epp.ticket(epp.decision_metadata(endpoints, "lease")) == "lease"


@pytest.mark.parametrize(
    "endpoints", [[], [""], ["10.0.0.1"], [":80"], ["a:b"], ["a:1,b:2"], ["a:1\n"], ["a b:1"], ["a:1 "]]
)
def test_a_destination_is_a_list_of_endpoints(endpoints):
    with pytest.raises(ValueError, match="endpoint"):
        epp.destination_value(endpoints)


def test_pitfall_08_later_metadata_takes_nothing_back():
    merged: dict = {}
    epp.merge_metadata(merged, {"envoy.lb": {"a": 1}, "warmroute": {"ticket": "t"}})
    epp.merge_metadata(merged, {})
    epp.merge_metadata(merged, {"envoy.lb": {"b": 2}})
    assert merged == {"envoy.lb": {"a": 1, "b": 2}, "warmroute": {"ticket": "t"}}


def test_served_endpoint_and_ticket_are_texts():
    assert epp.served_endpoint({"envoy.lb": {epp.SERVED_KEY: "10.0.0.1:1"}}) == "10.0.0.1:1"
    assert epp.served_endpoint({"envoy.lb": {epp.SERVED_KEY: 3.0}}) is None
    assert epp.ticket({"warmroute": {"ticket": ""}}) is None
    assert epp.ticket({}) is None


@pytest.mark.parametrize("name", ["", "X-Upper", ":path", "a b", "a\r", "ä", "host", "a:b"])
def test_pitfall_20_illegal_header_names(name):
    with pytest.raises(ValueError, match=r"header|host"):
        epp.check_header(name, "v")


@pytest.mark.parametrize("value", ["a\r\nb", "a\nb", "\x00", "\x7f"])
def test_pitfall_20_illegal_header_values(value):
    with pytest.raises(ValueError, match="control characters"):
        epp.check_header("x-a", value)


@given(st.from_regex(r"[a-z0-9!#$%&'*+.^_`|~-]+", fullmatch=True).filter(lambda name: name != "host"))
def test_legal_headers_pass(name):
    epp.check_header(name, "any value, with spaces\tand tabs; ü")
