from hypothesis import given
from hypothesis import strategies as st

from extproc.core.types import AllBlocksCleared
from extproc.sim.event_link import EventLink

ONE, TWO, THREE = ((AllBlocksCleared(),) * count for count in (1, 2, 3))


def test_a_batch_comes_after_the_delay():
    assert EventLink(0.5, 2.0).send(ONE, 10.0) == [(10.5, ONE)]


def test_what_was_lost_is_asked_for_when_the_next_one_comes():
    link = EventLink(0.5, 2.0)
    link.lose(ONE)
    link.lose(TWO)
    assert link.send(THREE, 10.0) == [(12.5, ONE), (12.5, TWO), (12.5, THREE)]


def test_what_comes_during_a_replay_waits_for_its_end():
    link = EventLink(0.5, 2.0)
    link.lose(ONE)
    link.send(TWO, 10.0)
    assert link.send(THREE, 11.0) == [(12.5, THREE)]
    assert link.send(THREE, 12.5) == [(13.0, THREE)]


def test_without_replay_a_gap_is_told_once_and_the_stream_goes_on():
    link = EventLink(0.5, None)
    link.lose(ONE)
    link.lose(TWO)
    assert link.send(THREE, 10.0) == [(10.5, None), (10.5, THREE)]
    assert link.send(ONE, 11.0) == [(11.5, ONE)]


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 5.0)), max_size=30))
def test_with_replay_all_batches_come_in_order_but_those_nobody_has_noticed_yet(steps):
    link, now, sent, came, times = EventLink(0.5, 2.0), 0.0, [], [], []
    noticed = 0
    for lost, later in steps:
        now += later
        batch = (AllBlocksCleared(),) * len(sent)
        sent.append(batch)
        if lost:
            link.lose(batch)
        else:
            for at, one in link.send(batch, now):
                times.append(at)
                came.append(one)
            noticed = len(sent)
    assert came == sent[:noticed]
    assert times == sorted(times)
