import pytest

from loadtests.peers.in_flight import InFlight


def test_what_began_and_has_not_ended_is_counted_where_it_is():
    load = InFlight(2)
    load.begin("a", 1)
    load.begin("b", 1)
    assert (load.counts, load.processed) == ([0, 2], [0, 2])
    assert load.end("a") == 1
    assert (load.counts, load.processed) == ([0, 1], [0, 2])
    with pytest.raises(KeyError):
        load.end("a")
