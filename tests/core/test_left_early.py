from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.left_early import SLACK_S, WAIT_S
from extproc.core.types import Completion, Outcome
from tests.core.test_router import make_router
from tests.support.core import request, worker

LEFT = Completion(Outcome.CANCELLED, duration_ms=1000.0)


class Fleet:
    """A router whose requests all have the same id."""

    def __init__(self):
        self.router = make_router(3)
        self.router.on_access_log(is_open=True)

    def ask(self, now, request_id="r"):
        return self.router.schedule(request(range(100), request_id=request_id), now).lease_id

    def stream_ends(self, lease, now):
        return self.router.on_stream_ended(lease, now, undelivered=True)

    def told(self, now, request_id="r"):
        return self.router.on_left_early(request_id, LEFT, now)


def test_the_lease_of_a_request_whose_client_left_before_the_ticket_ends_as_cancelled():
    fleet = Fleet()
    lease = fleet.ask(10.0)
    assert fleet.stream_ends(lease, 10.4) is None
    released = fleet.told(10.5)
    assert (released.lease.id, released.completion.outcome) == (lease, Outcome.CANCELLED)
    assert (len(fleet.router.ledger), fleet.told(10.6), fleet.router.tick(100.0)) == (0, None, [])


def test_an_entry_may_overtake_the_end_of_the_stream_a_little():
    fleet = Fleet()
    soon, late = fleet.ask(10.0, "soon"), fleet.ask(10.0, "late")
    assert (fleet.told(10.5, "soon"), fleet.told(10.5, "late")) == (None, None)
    assert len(fleet.router.ledger) == 2
    assert fleet.stream_ends(soon, 10.6).completion is LEFT
    assert fleet.stream_ends(late, 10.6 + WAIT_S) is None
    assert len(fleet.router.ledger) == 1


def test_a_request_id_that_several_have_ends_none():
    fleet = Fleet()
    leases = [fleet.ask(10.0), fleet.ask(10.1)]
    for lease in leases:
        fleet.stream_ends(lease, 10.4)
    assert fleet.told(10.5) is None
    fleet.router.release(leases[0], Completion(Outcome.FINISHED), 10.6)
    assert fleet.told(10.7).lease.id == leases[1]


def test_a_request_that_began_long_before_is_another():
    fleet = Fleet()
    lease = fleet.ask(10.0)
    fleet.stream_ends(lease, 10.1)
    assert fleet.told(11.1 + SLACK_S) is None
    assert fleet.told(10.9 + SLACK_S).lease.id == lease


def test_what_was_served_is_left_alone():
    fleet = Fleet()
    served, begun, later = (fleet.ask(10.0, name) for name in ("served", "begun", "later"))
    fleet.router.on_served(served, worker(0).endpoint, 10.1)
    fleet.router.on_first_token(begun, 10.1)
    fleet.told(10.2, "later")
    fleet.router.on_first_token(later, 10.2)
    assert [fleet.stream_ends(lease, 10.3) for lease in (served, begun, later)] == [None] * 3
    assert [fleet.told(10.4, name) for name in ("served", "begun", "later")] == [None] * 3
    assert len(fleet.router.ledger) == 3


def test_requests_that_are_not_ours_end_nothing():
    fleet = Fleet()
    lease = fleet.ask(10.0)
    fleet.stream_ends(lease, 10.1)
    assert fleet.told(10.2, "other") is None
    assert lease in fleet.router.ledger


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "stream", "first", "served", "told", "end"]),
        st.integers(0, 9),
        st.sampled_from(["a", "b"]),
        st.sampled_from([0.0, 0.1, WAIT_S, SLACK_S]),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_an_entry_never_ends_a_lease_whose_stream_is_open_or_that_was_served(history):
    fleet, leases, ended, now = Fleet(), [], [], 10.0
    for kind, index, request_id, pause in history:
        now += pause
        lease = leases[index % len(leases)] if leases else "none"
        open_lease = fleet.router.ledger.get(lease)
        match kind:
            case "ask":
                leases.append(fleet.ask(now, request_id))
            case "stream":
                ended.append(fleet.stream_ends(lease, now))
            case "first":
                fleet.router.on_first_token(lease, now)
            case "served":
                fleet.router.on_served(lease, worker(index % 3).endpoint, now)
            case "told":
                ended.append(fleet.told(now, request_id))
            case "end" if open_lease is not None:
                assert fleet.router.release(lease, Completion(Outcome.FINISHED), now) is not None
            case _:
                pass
    ends = [one for one in ended if one is not None]
    assert len({one.lease.id for one in ends}) == len(ends)
    for one in ends:
        assert one.lease.stream_ended_at is not None
        assert (one.lease.served_by, one.lease.first_token_at) == (None, None)
    for lease in leases:
        fleet.router.release(lease, Completion(Outcome.FINISHED), now)
    assert (fleet.router._left_early._open, fleet.router._left_early._waiting) == ({}, {})
