import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.peer_loads import MAX_REPLICAS, NOTHING_TOLD, PeerLoads, PeerNews, ToldLoad
from extproc.core.peer_teller import LoadTeller
from tests.support.core import worker

LOAD = ToldLoad(4, 2, 8000, 100, 400.0, 3000.0, 600.0)


def everyone(_):
    return True


def news(number, *loads, whole=False, replica="a", epoch=1):
    return PeerNews(replica, epoch, number, whole, loads)


def told(*messages, at=0.0):
    peers = PeerLoads()
    for message in messages:
        peers.take(message, everyone, at)
    return peers


def test_nothing_told_is_nothing():
    assert PeerLoads().load(worker(), 0.0) is NOTHING_TOLD


def test_nothing_that_came_over_the_wire_is_nothing():
    decoded = ToldLoad(0, 0, 0, 0, 0.0, 0.0, 0.0)
    assert decoded is not NOTHING_TOLD
    peers = told(news(1, (worker(), LOAD)), news(2, (worker(), decoded)), news(1, replica="b"))
    assert peers.load(worker(), 0.0) is NOTHING_TOLD
    peers.take(news(2, (worker(), LOAD), replica="b"), everyone, 0.0)
    assert peers.load(worker(), 0.0) == LOAD
    assert peers.load(worker(), 0.5) == told(news(1, (worker(), LOAD))).load(worker(), 0.5)


def test_loads_of_replicas_add_up():
    peers = told(news(1, (worker(), LOAD)), news(1, (worker(), LOAD), replica="b"))
    assert peers.load(worker(), 0.0) == ToldLoad(8, 4, 16000, 200, 800.0, 6000.0, 1200.0)
    assert peers.sequences(worker()) == 8
    assert peers.load(worker(1), 0.0) is NOTHING_TOLD


def test_the_last_word_counts_not_the_last_to_arrive():
    less = replace_sequences(1)
    peers = told(news(2, (worker(), less)), news(1, (worker(), LOAD)), news(2, (worker(), LOAD)))
    assert peers.load(worker(), 0.0).sequences == 1


def replace_sequences(count):
    return LOAD._replace(sequences=count)


def test_a_lost_delta_is_healed_by_the_next_snapshot():
    peers = told(news(1, (worker(0), LOAD), (worker(1), LOAD)))  # delta 2, which ended them, is lost
    assert peers.load(worker(0), 0.0).sequences == 4
    peers.take(news(3, (worker(1), LOAD), whole=True), everyone, 0.0)
    assert peers.load(worker(0), 0.0) is NOTHING_TOLD
    assert peers.load(worker(1), 0.0).sequences == 4
    peers.take(news(2, (worker(0), LOAD)), everyone, 0.0)  # the lost one, very late
    assert peers.load(worker(0), 0.0) is NOTHING_TOLD


def test_a_late_snapshot_takes_nothing_newer_back():
    peers = told(news(5, (worker(), LOAD)), news(4, whole=True))
    assert peers.load(worker(), 0.0).sequences == 4


def test_a_restarted_replica_begins_anew():
    peers = told(news(90, (worker(), LOAD)))
    assert peers.take(news(1, epoch=2), everyone, 0.0)
    assert peers.load(worker(), 0.0) is NOTHING_TOLD
    assert not peers.take(news(91, (worker(), LOAD)), everyone, 0.0)
    assert peers.load(worker(), 0.0) is NOTHING_TOLD


def test_queued_prefill_is_worked_off_meanwhile():
    load = told(news(1, (worker(), LOAD))).load(worker(), 0.1)
    assert load.queued_prefill_ms == pytest.approx(300.0)
    assert load.queued_prefill_tokens == pytest.approx(2250.0)
    assert load.prefilling == 2
    later = told(news(1, (worker(), LOAD))).load(worker(), 1.0)
    assert (later.queued_prefill_ms, later.prefilling, later.sequences) == (0.0, 0, 4)


def test_a_silent_replica_counts_for_less_and_less_and_is_forgotten():
    peers = told(news(1, (worker(), LOAD)))
    assert [peers.load(worker(), at).sequences for at in (2.0, 4.0, 6.0)] == [4, 2, 0]
    peers.tick(5.9)
    assert len(peers) == 1
    peers.tick(6.0)
    assert (len(peers), peers.sequences(worker())) == (0, 0)


def test_a_sign_of_life_is_enough():
    peers = told(news(1, (worker(), LOAD)))
    peers.take(news(2), everyone, 5.0)
    assert peers.load(worker(), 6.9).sequences == 4


def test_a_repeated_message_is_no_sign_of_life():
    peers = told(news(1, (worker(), LOAD)))
    assert not peers.take(news(1, (worker(), LOAD)), everyone, 5.0)
    assert peers.load(worker(), 6.0) is NOTHING_TOLD or not peers.load(worker(), 6.0).sequences


def test_what_can_be_told_is_bounded():
    peers = PeerLoads()
    for n in range(MAX_REPLICAS + 5):
        peers.take(news(1, (worker(), LOAD), replica=f"r{n}"), everyone, 0.0)
    assert len(peers) == MAX_REPLICAS
    assert peers.refused == 5
    peers = PeerLoads()
    peers.take(news(1, *((worker(n), LOAD) for n in range(200))), lambda who: who == worker(3), 0.0)
    assert [n for n in range(200) if peers.load(worker(n), 0.0).sequences] == [3]


def test_steps_shared_with_their_sequences():
    assert LOAD.beside(100.0) == 400.0
    assert LOAD.beside(1000.0) == 600.0
    assert LOAD.context_beside(100.0) == 400.0 * 2000
    assert NOTHING_TOLD.context_beside(100.0) == 0.0


def test_times_must_make_sense():
    with pytest.raises(ValueError, match="the first must be less"):
        PeerLoads(5.0, 5.0)


LOADS = st.dictionaries(st.integers(0, 3), st.integers(0, 5), max_size=4)


@given(st.lists(LOADS, min_size=1, max_size=12), st.data())
def test_whatever_is_lost_repeated_or_late_the_last_snapshot_makes_it_true(history, data):
    """And without losses, deltas in any order do."""
    teller, messages = LoadTeller("a", 1), []
    for loads in history:
        before = teller.number
        told_now = {
            worker(n): replace_sequences(loads[n]) if loads.get(n) else NOTHING_TOLD for n in range(4)
        }
        teller.look(told_now.items(), 0.0)
        messages += [teller.since(before), teller.snapshot()]
    every_delta = data.draw(st.permutations(messages[::2]))
    some = data.draw(st.lists(st.sampled_from(messages), max_size=20))
    for heard in (every_delta, [*some, messages[-1], *some]):
        peers = PeerLoads()
        for message in heard:
            peers.take(message, everyone, 0.0)
        for n in range(4):
            assert peers.load(worker(n), 0.0).sequences == history[-1].get(n, 0)


def test_a_replica_as_it_looks_from_here():
    (one,) = told(news(1, (worker(0), LOAD), (worker(1), LOAD))).heard(4.0)
    assert (one.name, one.silent_s, one.weight, one.sequences) == ("a", 4.0, 0.5, 8)
