import inspect
from array import array

import msgspec
import pytest

from extproc.core.errors import NoEndpointError
from extproc.core.namespace import Namespace
from extproc.core.policies import POLICIES
from extproc.core.router import Router
from extproc.core.types import Completion, Outcome
from extproc.journal.tap import INPUTS, READS, Recorder
from tests.support.core import members, metrics, request, stored, worker
from tests.support.recorded import HEADER, Traffic

PROMPT = list(range(7_000_000, 7_000_200))


def recorded(write=None, on_error=pytest.fail):
    entries, ids = [], iter("abcdefgh")
    recorder = Recorder(write or entries.append, on_error)
    router = HEADER.build(POLICIES, lambda: next(ids), recorder.prompt_hashes, recorder.event_hashes)
    recorder.attach(router)
    router.on_membership(members(2), 0.0)
    return router, recorder, entries


def names(entries):
    return [INPUTS[entry[0]] for entry in entries]


def test_every_method_of_the_router_is_known_to_change_it_or_not_to():
    """A method that changes the router and is not recorded would break every replay."""
    public = {name for name, _ in inspect.getmembers(Router, inspect.isfunction) if not name.startswith("_")}
    assert public == set(INPUTS) | READS


def test_calls_are_written_in_order_and_those_the_router_makes_of_itself_are_not():
    router, _, entries = recorded()
    decision = router.schedule(request(PROMPT), 1.0)
    router.on_stream_ended(decision.lease_id, 2.0, undelivered=True)
    assert [released.lease.id for released in router.tick(1e6)] == [decision.lease_id]
    assert names(entries) == ["on_membership", "schedule", "on_stream_ended", "tick"]


def test_what_is_written_can_be_written_to_a_file_and_holds_no_prompt_and_no_secret():
    router, _, entries = recorded()
    salted = Namespace("model", "tokenizer", "lora", "the-salt")
    router.on_kv_events(worker(0), [stored(PROMPT, extra_keys=(("the-salt",), *((None,) * 11)))], 0.5)
    router.schedule(request(PROMPT, namespace=salted, session_key="someone@example.org"), 1.0)
    data = msgspec.msgpack.encode(entries)
    for secret in (b"the-salt", b"someone@example.org", array("I", PROMPT[:2]).tobytes()):
        assert secret not in data
    assert msgspec.msgpack.encode(PROMPT[50]) not in data


def test_recording_changes_no_decision(monkeypatch):
    watched = Traffic().run(300)
    monkeypatch.setattr(Recorder, "attach", lambda self, router: None)
    quiet = Traffic().run(300)
    assert quiet.entries == []
    assert [d.candidates for d in quiet.decisions] == [d.candidates for d in watched.decisions]


def test_iterators_are_read_once_and_handed_on():
    router, _, entries = recorded()
    router.on_membership((member for member in members(3)), 1.0)
    assert len(router.table) == 3
    assert len(entries[-1][1][0]) == 3


def test_a_refusal_is_written():
    router, _, entries = recorded()
    router.on_membership([], 1.0)
    with pytest.raises(NoEndpointError):
        router.schedule(request(PROMPT), 2.0)
    assert "no workers" in entries[-1][3]["refused"]


def test_when_writing_fails_recording_ends_is_reported_once_and_routing_goes_on():
    said, room = [], [3]

    def write(entry):
        room[0] -= 1
        if room[0] < 0:
            raise OSError("disk full")

    router, recorder, _ = recorded(write, said.append)
    for number in range(10):
        decision = router.schedule(request(PROMPT, request_id=str(number)), 1.0 + number)
        router.release(decision.lease_id, Completion(Outcome.FINISHED), 1.5 + number) if number < 5 else None
        if number >= 5:
            break
    assert len(said) == 1
    assert "disk full" in said[0]
    assert "requests go on" in said[0]
    assert not recorder.recording
    assert router.schedule.__func__ is Router.schedule


def test_after_it_stopped_nothing_is_collected():
    router, recorder, entries = recorded()
    recorder.stop()
    before = len(entries)
    router.on_kv_events(worker(0), [stored(PROMPT)], 1.0)
    router.on_metrics(worker(0).endpoint, {0: metrics()}, 1.0)
    assert len(entries) == before
    assert (recorder._events, recorder._prompts) == ([], {})
    assert len(router.schedule(request(PROMPT), 2.0).candidates) == 2
