import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.errors import ProtocolError
from extproc.protocol.endpoint_slices import GONE, ApiError, SliceWatch, WatchState

HTTP = {"name": "http", "port": 8000}


def part(name, *endpoints, version="1", family="IPv4", ports=(HTTP,)):
    entries = [{"addresses": [one]} if isinstance(one, str) else one for one in endpoints]
    return {
        "metadata": {"name": name, "resourceVersion": version},
        "addressType": family,
        "endpoints": entries,
        "ports": list(ports),
    }


def listed(*items, version="1"):
    watch = SliceWatch()
    watch.listed(items, version)
    return watch


def with_conditions(address, **conditions):
    return {"addresses": [address], "conditions": conditions}


def test_a_list_then_changes():
    watch = SliceWatch()
    assert watch.state is WatchState.LISTING
    watch.listed([part("a", "10.0.0.1")], "7")
    assert (watch.state, watch.version) == (WatchState.WATCHING, "7")
    assert watch.event({"type": "ADDED", "object": part("b", "10.0.0.2", version="8")}) is None
    assert watch.endpoints(None) == ("10.0.0.1:8000", "10.0.0.2:8000")
    watch.event({"type": "MODIFIED", "object": part("b", version="9")})
    watch.event({"type": "DELETED", "object": part("a", version="10")})
    assert watch.endpoints(None) == ()
    watch.event({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}})
    assert watch.version == "20"


@pytest.mark.parametrize(
    ("conditions", "counts"),
    [
        ({}, True),
        ({"ready": None}, True),
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),  # publishNotReadyAddresses
    ],
)
def test_what_counts_as_ready(conditions, counts):
    watch = listed(part("a", with_conditions("10.0.0.1", **conditions)))
    assert (watch.endpoints(None) == ("10.0.0.1:8000",)) is counts


def test_one_address_family_one_address_each_and_no_endpoint_twice():
    v6 = part("a", "fd00::1", family="IPv6")
    assert listed(v6).endpoints(None) == ("[fd00::1]:8000",)
    assert listed(v6, part("b", "10.0.0.1")).endpoints(None) == ("10.0.0.1:8000",)
    assert listed(part("a", "db.example", family="FQDN")).endpoints(None) == ()
    two = {"addresses": ["10.0.0.1", "10.0.0.9"]}
    assert listed(part("a", two, {"addresses": []}), part("b", "10.0.0.1")).endpoints(None) == (
        "10.0.0.1:8000",
    )
    assert listed({"metadata": {"name": "a"}, "addressType": "IPv4", "endpoints": None}).endpoints(None) == ()


def test_ports_by_number_by_name_or_the_only_one():
    both = (HTTP, {"name": "metrics", "port": 9090}, {"name": "any"})
    watch = listed(part("a", "10.0.0.1", ports=both))
    assert watch.endpoints("metrics") == ("10.0.0.1:9090",)
    assert watch.endpoints(1234) == ("10.0.0.1:1234",)
    with pytest.raises(ProtocolError, match=r"2 ports \(http 8000, metrics 9090\): name one"):
        watch.endpoints(None)
    with pytest.raises(ProtocolError, match="no port 'grpc'"):
        watch.endpoints("grpc")
    # One without anything ready says nothing about ports either.
    assert listed(part("a", ports=())).endpoints(None) == ()


def test_only_410_costs_the_history():
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd is busy"}}
    watch = listed(part("a", "10.0.0.1"), version="5")
    assert watch.event(error) == ApiError(500, "etcd is busy")
    assert (watch.state, watch.version) == (WatchState.WATCHING, "5")
    error["object"]["code"] = GONE
    assert watch.event(error).code == GONE
    assert watch.state is WatchState.LISTING
    assert watch.endpoints(None) == ("10.0.0.1:8000",)  # until the new list is there
    watch.listed([], "9")
    assert watch.endpoints(None) == ()


@pytest.mark.parametrize(
    "event",
    [
        None,
        {"type": "ADDED"},
        {"type": "ADDED", "object": {"metadata": {}}},
        {"type": "ADDED", "object": {"metadata": {"name": "a"}, "endpoints": 7}},
        {"type": "ADDED", "object": {"metadata": {"name": "a"}, "endpoints": [7]}},
        {"type": "ADDED", "object": {"metadata": {"name": "a"}, "endpoints": [{"addresses": "x"}]}},
        {"type": "ADDED", "object": {"metadata": {"name": "a"}, "ports": {}}},
        {"type": "RENAMED", "object": part("a")},
    ],
)
def test_nonsense_is_refused_and_changes_nothing(event):
    watch = listed(part("a", "10.0.0.1"))
    with pytest.raises(ProtocolError):
        watch.event(event)
    assert watch.endpoints(None) == ("10.0.0.1:8000",)


names = st.sampled_from("abc")
addresses = st.lists(st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"]), max_size=3, unique=True)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("put"), names, addresses),
        st.tuples(st.just("delete"), names, st.just([])),
        st.sampled_from([("break", "", []), ("gone", "", []), ("bookmark", "", [])]),
    )
)


@given(changes)
def test_however_the_watch_is_interrupted_it_ends_with_what_the_server_has(history):
    server, events, watch = {}, [], SliceWatch()
    oldest, connected = 0, False

    def catch_up():
        nonlocal connected
        if watch.state is WatchState.WATCHING and int(watch.version) < oldest:
            watch.event({"type": "ERROR", "object": {"code": GONE, "message": "too old"}})
        if watch.state is WatchState.LISTING:
            watch.listed([part(n, *a, version=str(v)) for n, (v, a) in server.items()], str(len(events)))
        for version, event in enumerate(events, 1):
            if version > int(watch.version) and event is not None:
                watch.event(event)
        connected = True

    for kind, name, found in history:
        version = len(events) + 1
        if kind == "put":
            events.append(
                {
                    "type": "MODIFIED" if name in server else "ADDED",
                    "object": part(name, *found, version=str(version)),
                }
            )
            server[name] = (version, found)
        elif kind == "delete" and name in server:
            del server[name]
            events.append({"type": "DELETED", "object": part(name, version=str(version))})
        elif kind == "bookmark" and connected:
            events.append(None)
            watch.event({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(len(events))}}})
        elif kind in ("break", "gone"):
            connected = False
            oldest = len(events) + 1 if kind == "gone" else oldest
            if kind == "gone":
                events.append(None)
        if connected:
            catch_up()
    catch_up()
    expected = {f"{one}:8000" for _, found in server.values() for one in found}
    assert set(watch.endpoints(None)) == expected
