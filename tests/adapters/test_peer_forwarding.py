import time

from extproc.adapters.deferred import Deferred
from extproc.adapters.peer_codec import Completed, FirstBody, LeftEarly, Served
from extproc.adapters.peer_forwarding import ForwardingService, owner_of
from extproc.core.types import Completion, Outcome

DONE = Completion(Outcome.FINISHED)


class Inner:
    def __init__(self):
        self.calls, self.knows = [], ()

    async def route(self, request):
        return ("routed", request)

    def first_body(self, lease_id):
        self.calls.append(("first_body", lease_id))

    def served(self, lease_id, endpoint):
        self.calls.append(("served", lease_id, endpoint))

    def stream_ended(self, lease_id, *, cancelled):
        self.calls.append(("stream_ended", lease_id, cancelled))

    def completed(self, lease_id, completion):
        self.calls.append(("completed", lease_id, completion))

    def left_early(self, request_id, completion):
        self.calls.append(("left_early", request_id, completion))
        return request_id in self.knows

    def access_log_streams(self, open_streams):
        raise AssertionError("the exchange tells it")


class Forwarding:
    def __init__(self, *known, later=None):
        self.inner, self.sent, self.streams, self.to_all = Inner(), [], [], []
        self.service = ForwardingService(
            self.inner, "me", self.send, self.to_all.append, self.streams.append, later
        )
        self.known = known

    def send(self, owner, signal):
        if owner in self.known:
            self.sent.append((owner, signal))
        return owner in self.known


def test_what_is_ours_stays_here():
    it = Forwarding("you")
    for ticket in ("me.1", "plain"):
        it.service.first_body(ticket)
        it.service.served(ticket, "a:1")
        it.service.completed(ticket, DONE)
        it.service.stream_ended(ticket, cancelled=True)
    assert it.sent == []
    assert [call[0] for call in it.inner.calls] == ["first_body", "served", "completed", "stream_ended"] * 2


def test_what_is_anothers_goes_to_it():
    it = Forwarding("you")
    it.service.first_body("you.1")
    it.service.served("you.1", "a:1")
    it.service.completed("you.1", DONE)
    assert it.inner.calls == []
    assert it.sent == [
        ("you", FirstBody("you.1")),
        ("you", Served("you.1", "a:1")),
        ("you", Completed("you.1", DONE)),
    ]
    assert it.service.counters.forwarded == 3


def test_what_belongs_to_nobody_is_counted():
    it = Forwarding()
    it.service.completed("gone.1", DONE)
    assert (it.sent, it.inner.calls, it.service.counters.unknown) == ([], [], 1)


def test_what_others_were_told_is_taken_and_never_handed_on():
    it = Forwarding("you")
    it.service.take(
        [FirstBody("me.1"), Served("me.1", "a:1"), Completed("me.1", DONE), Completed("you.1", DONE)]
    )
    assert [call[:2] for call in it.inner.calls] == [
        ("first_body", "me.1"),
        ("served", "me.1"),
        ("completed", "me.1"),
    ]
    assert (it.sent, it.service.counters.taken, it.service.counters.unknown) == ([], 3, 1)


async def test_ends_that_others_tell_by_the_hundred_do_not_hold_up_a_decision():
    later = Deferred(time.monotonic)
    it = Forwarding(later=later)
    it.service.take([Completed("me.1", DONE), LeftEarly("told", DONE), FirstBody("me.2")])
    assert [call[0] for call in it.inner.calls] == ["first_body"]
    later.flush()
    assert [call[:2] for call in it.inner.calls[1:]] == [("completed", "me.1"), ("left_early", "told")]
    later.close()


def test_a_request_without_a_ticket_is_ours_or_anybodys():
    it = Forwarding("you")
    it.inner.knows = ("ours",)
    assert it.service.left_early("ours", DONE)
    assert it.to_all == []
    assert not it.service.left_early("whose", DONE)
    assert it.to_all == [LeftEarly("whose", DONE)]
    it.service.take([LeftEarly("told", DONE)])
    assert [call[1] for call in it.inner.calls] == ["ours", "whose", "told"]
    assert len(it.to_all) == 1  # nothing is handed on twice


async def test_requests_and_streams_pass():
    it = Forwarding()
    assert await it.service.route("r") == ("routed", "r")
    it.service.access_log_streams(3)
    assert it.streams == [3]


def test_owners_of_tickets():
    assert [owner_of(ticket) for ticket in ("a.b", "a-b_c", ".x", "a.b.c")] == ["a", "", "", "a"]


def test_one_that_cannot_be_taken_keeps_no_other_from_it(caplog):
    it = Forwarding()

    def completed(lease_id, completion):
        if lease_id == "me.2":
            raise RuntimeError("a bug")
        it.inner.calls.append(lease_id)

    it.inner.completed = completed
    it.service.take(Completed(f"me.{number}", DONE) for number in (1, 2, 3))
    assert it.inner.calls == ["me.1", "me.3"]
    assert "news of a request failed" in caplog.text
