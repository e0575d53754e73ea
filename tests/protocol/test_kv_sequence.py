import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.errors import ProtocolError
from extproc.protocol.kv_sequence import KvSequence, State
from extproc.protocol.kv_sequence_types import (
    Action,
    Apply,
    RequestReplay,
    Reset,
    Resume,
    SequenceLimits,
    Suspend,
    TrustChanged,
)

NOISE = b"cannot be read"
LIMITS = SequenceLimits(reply_timeout_s=1.0, attempts=3, check_interval_s=30.0, overlap=1)


class Publisher:
    """vLLM's publisher: numbers, a bounded replay buffer, restarts without an epoch."""

    def __init__(self, keep: int = 10_000) -> None:
        self.keep = keep
        self.messages: list[tuple[int, bytes]] = []
        self.epoch = 0

    def publish(self) -> tuple[int, bytes]:
        message = len(self.messages), b"%d:%d" % (self.epoch, len(self.messages))
        self.messages.append(message)
        return message

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        kept = self.messages[-self.keep :] if self.keep else []
        return [message for message in kept if message[0] >= start]

    def restart(self) -> None:
        self.messages = []
        self.epoch += 1


class Host:
    """Carries out the machine's actions as the subscriber does; the state is the list of payloads applied."""

    def __init__(self, publisher: Publisher, limits: SequenceLimits = LIMITS, **options) -> None:
        self.publisher = publisher
        self.machine = KvSequence(limits=limits, **options)
        self.now = 0.0
        self.applied: list[bytes] = []
        self.trust = [self.machine.trust()]  # as told, one after the other
        self.resets = 0
        self.suspended = False
        self.request: int | None = None

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(seq, payload):
                    self.apply(seq, payload)
                case RequestReplay(start):
                    self.request = start
                case Reset():
                    self.applied.clear()
                    self.resets += 1
                case TrustChanged():
                    self.trust.append(self.machine.trust())
                case Suspend() | Resume():
                    assert self.suspended != isinstance(action, Suspend)
                    self.suspended = isinstance(action, Suspend)

    def apply(self, seq: int, payload: bytes) -> None:
        self.applied.append(payload)
        if payload == NOISE:
            self.take(self.machine.unreadable(seq))

    def connect(self) -> None:
        self.take(self.machine.connected(self.now))

    def live(self, *messages: tuple[int, bytes]) -> None:
        for seq, payload in messages:
            self.take(self.machine.live(seq, payload, self.now))

    def answer(self, *, drop: Callable[[int], bool] = lambda at: False, end: bool = True) -> None:
        """Answer the running request once; `drop` says which messages of the answer are lost."""
        assert self.request is not None
        start, self.request = self.request, None
        for at, (seq, payload) in enumerate(self.publisher.replay(start)):
            if self.request is not None:
                return  # a newer request: this answer is not passed on any more
            if not drop(at):
                self.take(self.machine.replayed(seq, payload, self.now))
        if end and self.request is None:
            self.take(self.machine.replay_end(self.now))

    def wait(self) -> None:
        deadline = self.machine.next_deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        self.take(self.machine.tick(self.now))

    def settle(self) -> None:
        """Honest answers until nothing is asked, then one check of the end."""
        for _ in range(100):
            if self.request is not None:
                self.answer()
            elif self.machine.state is State.LIVE:
                return
            else:
                self.wait()
        raise AssertionError(f"never settled: {self.machine.state}")

    def check(self) -> None:
        self.settle()
        self.wait()
        self.settle()

    @property
    def truth(self) -> list[bytes]:
        return [payload for _, payload in self.publisher.messages]


def host(count: int = 0, keep: int = 10_000, **options) -> Host:
    publisher = Publisher(keep)
    for _ in range(count):
        publisher.publish()
    return Host(publisher, **options)


def test_connect_then_replay_then_live() -> None:
    h = host(5)
    h.connect()
    assert h.request == 0
    h.live(h.publisher.publish())  # arrives before the answer: waits
    assert h.applied == []
    h.answer()
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_trust_needs_the_end_to_be_seen() -> None:
    h = host(5)
    h.connect()
    h.answer(drop=lambda at: at == 4)  # the tail is lost, the end marker is not
    assert not h.machine.trust().trusted
    assert h.machine.state is State.CHECKING
    h.settle()
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_an_empty_answer_alone_is_no_proof() -> None:
    h = host(7, keep=0)
    h.connect()
    h.settle()
    assert not h.machine.trust().trusted
    h.live(h.publisher.publish())
    h.settle()
    assert h.applied == h.truth[7:]
    assert not h.machine.trust().trusted
    assert "0 to 6" in h.machine.trust().cause


def test_a_fresh_engine_is_trusted_from_its_first_message() -> None:
    h = host()
    h.connect()
    h.settle()
    h.live(h.publisher.publish())
    assert h.machine.trust().trusted


@pytest.mark.parametrize("restarted", [False, True])
def test_an_engine_that_has_said_nothing_yet_is_not_said_to_be_asked_still(restarted: bool) -> None:
    h = host(3 if restarted else 0)
    h.connect()
    h.settle()
    if restarted:
        h.publisher.restart()
        h.take(h.machine.disconnected(h.now))
        h.connect()
        h.settle()
    assert h.machine.trust() == (False, "no message seen yet")
    h.check()
    assert h.trust[-1] == (False, "no message seen yet")


def test_a_hole_is_still_the_reason_after_a_reconnect() -> None:
    h = host(50, keep=10)
    h.connect()
    h.settle()
    h.take(h.machine.disconnected(h.now))
    h.connect()
    h.settle()
    assert (h.machine.trust().trusted, h.resets) == (False, 0)
    assert "0 to 39" in h.trust[-1].cause


def test_truncated_replay_is_applied_but_not_trusted_until_a_clear() -> None:
    h = host(50, keep=10)
    h.connect()
    h.settle()
    assert h.applied == h.truth[40:]
    assert not h.machine.trust().trusted
    assert "0 to 39" in h.machine.trust().cause
    seq, payload = h.publisher.publish()
    h.live((seq, payload))
    h.take(h.machine.cleared(seq))
    assert h.machine.trust().trusted


def test_a_clear_before_the_hole_does_not_count() -> None:
    h = host(50, keep=10)
    h.connect()
    h.settle()
    h.take(h.machine.cleared(39))
    assert not h.machine.trust().trusted


def test_d46_gap_is_filled_and_distrusted_meanwhile() -> None:
    h = host(2)
    h.connect()
    h.settle()
    assert h.machine.trust().trusted
    h.publisher.publish()
    h.publisher.publish()
    h.live(h.publisher.publish())
    assert h.request == 1  # from the last known message: it proves that the engine is the same
    assert not h.machine.trust().trusted
    assert h.machine.gaps == 1
    assert "2 to 3" in h.machine.trust().cause
    h.answer()
    assert h.applied == h.truth
    assert h.machine.trust().trusted
    assert h.resets == 0


def test_d46_gap_that_cannot_be_filled_goes_on_without_trust() -> None:
    h = host(2)
    h.connect()
    h.settle()
    h.publisher.publish()
    lost = h.publisher.publish()
    late = h.publisher.publish()
    h.live(late)
    while h.request is not None:
        h.answer(drop=lambda at: at > 0)  # the publisher answers, but never with what is missing
    assert h.applied == [*h.truth[:2], late[1]]
    assert lost[1] not in h.applied
    assert not h.machine.trust().trusted
    h.live(h.publisher.publish())
    assert not h.machine.trust().trusted


def test_gap_without_an_answer_is_given_up_after_some_attempts() -> None:
    h = host(2)
    h.connect()
    h.settle()
    h.publisher.publish()
    h.live(h.publisher.publish())
    asked = 0
    while h.machine.state is not State.LIVE:
        assert h.request is not None
        h.request, asked = None, asked + 1
        h.wait()
    assert asked == LIMITS.attempts
    assert h.applied == [*h.truth[:2], h.truth[3]]
    assert not h.machine.trust().trusted


def test_hole_nobody_answered_for_is_rebuilt_when_the_endpoint_is_back() -> None:
    h = host(2)
    h.connect()
    h.settle()
    h.publisher.publish()
    h.live(h.publisher.publish())
    while h.machine.state is not State.LIVE:
        h.request = None
        h.wait()
    assert not h.machine.trust().trusted
    h.check()
    assert h.resets == 1
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_hole_that_is_gone_for_good_is_not_asked_for_again() -> None:
    h = host(2, keep=3)
    h.connect()
    h.settle()
    h.publisher.publish()
    h.live(h.publisher.publish())
    while h.machine.state is not State.LIVE:
        h.request = None
        h.wait()
    for _ in range(5):
        h.live(h.publisher.publish())
    applied = list(h.applied)
    h.check()
    h.check()
    assert h.resets == 0
    assert h.applied == applied
    assert not h.machine.trust().trusted


def test_reconnect_without_an_answer_is_made_good_by_a_later_check() -> None:
    h = host(5)
    h.connect()
    h.settle()
    h.take(h.machine.disconnected(h.now))
    h.connect()
    while h.machine.state is not State.LIVE:
        h.request = None
        h.wait()
    assert not h.machine.trust().trusted
    assert "did not answer" in h.machine.trust().cause
    h.check()
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_slow_replay_without_end_marker_is_asked_for_the_rest() -> None:
    h = host(10)
    h.connect()
    h.answer(drop=lambda at: at >= 4, end=False)
    assert h.applied == h.truth[:4]
    assert not h.machine.trust().trusted
    h.wait()
    assert h.request == 3
    h.settle()
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_hole_inside_an_answer_is_asked_again_at_once() -> None:
    h = host(10)
    h.connect()
    h.answer(drop=lambda at: at in {3, 4})
    assert h.request == 2
    h.settle()
    assert h.applied == h.truth


@pytest.mark.parametrize("survivors", [0, 3])
def test_d47_restart_seen_live_resets_and_rebuilds(survivors: int) -> None:
    h = host(900)
    h.connect()
    h.live(h.publisher.publish())
    h.settle()
    h.publisher.restart()
    for _ in range(survivors):
        h.publisher.publish()  # missed
    h.live(h.publisher.publish())
    assert h.applied == []
    assert h.request == 0
    assert not h.machine.trust().trusted
    h.settle()
    assert h.resets == 1
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_d47_restarted_engine_that_begins_with_the_number_it_ended_with() -> None:
    h = host()
    h.connect()
    h.settle()
    h.live(h.publisher.publish())
    h.publisher.restart()
    h.live(h.publisher.publish())
    assert h.resets == 1
    h.settle()
    assert h.applied == h.truth


@pytest.mark.parametrize("count", [0, 3, 10, 11, 40])
def test_d47_restart_while_disconnected_is_found_whatever_number_it_has_reached(count: int) -> None:
    h = host(10)
    h.connect()
    h.settle()
    h.take(h.machine.disconnected(h.now))
    assert not h.machine.trust().trusted
    h.publisher.restart()
    for _ in range(count):
        h.publisher.publish()
    h.connect()
    h.check()
    assert h.resets == 1
    assert h.applied == h.truth
    assert h.machine.trust().trusted == (count > 0)


def test_d47_new_engine_whose_message_bears_the_next_number_is_found_on_reconnect() -> None:
    h = host(10, limits=replace(LIMITS, overlap=4))
    h.connect()
    h.settle()
    h.publisher.restart()
    for _ in range(10):
        h.publisher.publish()
    h.live(h.publisher.publish())  # arrives before the news of the lost connection
    h.take(h.machine.disconnected(h.now))
    h.connect()
    h.settle()
    assert h.resets == 1
    assert h.applied == h.truth


@pytest.mark.parametrize("restarted", [False, True])
def test_d47_after_a_lost_connection_nothing_counts_until_it_is_known_who_is_there(restarted: bool) -> None:
    h = host(10)
    h.connect()
    h.settle()
    assert not h.suspended
    h.take(h.machine.disconnected(h.now))
    assert h.suspended
    if restarted:
        h.publisher.restart()
    h.connect()
    assert h.suspended
    h.answer()
    assert not h.suspended
    assert bool(h.applied) != restarted


def test_nothing_known_is_nothing_to_suspend() -> None:
    h = host()
    h.connect()
    h.take(h.machine.disconnected(h.now))
    assert not h.suspended


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("missed", [0, 3])
def test_without_an_answer_the_next_live_message_tells_who_is_there(replay: bool, missed: int) -> None:
    h = host(replay=replay)
    h.connect()
    if replay:
        h.settle()
    h.live(h.publisher.publish())
    h.take(h.machine.disconnected(h.now))
    h.connect()
    while h.machine.state is not State.LIVE:
        h.wait()
    assert h.suspended
    for _ in range(missed):
        h.publisher.publish()
    h.live(h.publisher.publish())
    if replay and missed:
        h.settle()
    assert not h.suspended
    assert h.resets == 0


def test_reconnect_to_the_same_engine_keeps_the_index() -> None:
    h = host(10)
    h.connect()
    h.settle()
    h.take(h.machine.disconnected(h.now))
    h.publisher.publish()
    h.connect()
    assert h.request == 9
    h.settle()
    assert h.resets == 0
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_reconnect_after_more_than_the_buffer_starts_over() -> None:
    h = host(10, keep=5)
    h.connect()
    h.settle()
    h.take(h.machine.disconnected(h.now))
    for _ in range(20):
        h.publisher.publish()
    h.connect()
    h.settle()
    assert h.resets == 1
    assert h.applied == h.truth[-5:]
    assert not h.machine.trust().trusted


@pytest.mark.parametrize("count", [4, 10, 11])
def test_restart_nobody_noticed_is_found_by_the_check(count: int) -> None:
    h = host(10)
    h.connect()
    h.settle()
    h.publisher.restart()
    for _ in range(count):
        h.publisher.publish()
    h.check()
    assert h.applied == h.truth
    assert h.resets == 1


def test_message_lost_before_a_silence_is_found_by_the_check() -> None:
    h = host(3)
    h.connect()
    h.settle()
    h.publisher.publish()
    h.check()
    assert h.applied == h.truth
    assert h.resets == 0


def test_live_stream_goes_on_during_a_check() -> None:
    h = host(3)
    h.connect()
    h.settle()
    h.wait()
    assert h.machine.state is State.CHECKING
    h.live(h.publisher.publish())
    assert h.applied == h.truth
    h.answer()
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_silent_check_costs_nothing() -> None:
    h = host(3)
    h.connect()
    h.settle()
    h.wait()
    h.request = None
    h.wait()
    assert h.machine.state is State.LIVE
    assert h.machine.trust().trusted


def test_without_replay_a_stream_from_the_beginning_is_trusted() -> None:
    h = host(replay=False)
    h.connect()
    h.live(h.publisher.publish(), h.publisher.publish())
    assert h.request is None
    assert h.machine.next_deadline() is None
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_without_replay_a_late_start_is_untrusted_until_clear() -> None:
    h = host(3, replay=False)
    h.connect()
    seq, payload = h.publisher.publish()
    h.live((seq, payload))
    assert h.applied == [payload]
    assert not h.machine.trust().trusted
    h.take(h.machine.cleared(seq))
    assert h.machine.trust().trusted


def test_without_replay_a_reconnect_costs_the_trust_and_a_restart_restores_it() -> None:
    h = host(replay=False)
    h.connect()
    h.live(h.publisher.publish())
    h.take(h.machine.disconnected(h.now))
    h.connect()
    h.live(h.publisher.publish())
    assert not h.machine.trust().trusted
    h.publisher.restart()
    h.live(h.publisher.publish())
    assert h.resets == 1
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_unreadable_payload_costs_the_trust_until_clear() -> None:
    h = host(3)
    h.connect()
    h.settle()
    h.take(h.machine.unreadable(1))
    assert h.trust[-1] == (False, "message 1 could not be read")
    h.take(h.machine.cleared(2))
    assert h.machine.trust().trusted


@pytest.mark.parametrize("replay", [False, True])
def test_a_first_message_that_cannot_be_read_is_not_told_to_be_complete(replay: bool) -> None:
    h = host(replay=replay)
    h.connect()
    if replay:
        h.settle()
    h.live((h.publisher.publish()[0], NOISE))
    assert h.trust[-1] == h.machine.trust() == (False, "message 0 could not be read")


def spoiled(host: Host, *, at_the_source: bool = False) -> None:
    """The next live message cannot be read; the publisher may have made it so. Others follow."""
    seq, _ = host.publisher.publish()
    if at_the_source:
        host.publisher.messages[seq] = seq, NOISE
    host.live((seq, NOISE))
    for _ in range(LIMITS.overlap + 2):
        host.live(host.publisher.publish())
    assert not host.machine.trust().trusted


def asked_by_the_check(host: Host) -> int | None:
    host.settle()
    host.wait()
    asked = host.request
    host.settle()
    return asked


@pytest.mark.parametrize("start", [0, 3])
def test_a_message_that_the_wire_has_spoiled_is_asked_again_and_all_is_trusted(start: int) -> None:
    h = host(start)
    h.connect()
    h.settle()
    spoiled(h)
    h.check()
    assert h.machine.trust().trusted
    assert h.applied == h.truth
    assert h.resets == 1


def test_a_message_that_nobody_can_read_is_asked_again_once() -> None:
    h = host(3)
    h.connect()
    h.settle()
    spoiled(h, at_the_source=True)
    assert asked_by_the_check(h) == 0
    assert asked_by_the_check(h) == h.machine.last
    assert (h.resets, h.machine.trust().trusted) == (0, False)
    assert h.applied == h.truth


def test_a_spoiled_message_is_asked_again_while_nobody_answers() -> None:
    h = host(3)
    h.connect()
    h.settle()
    spoiled(h)
    h.wait()
    h.request = None  # no answer
    h.wait()
    h.check()
    assert h.machine.trust().trusted
    assert h.applied == h.truth


def test_a_message_at_which_answers_break_off_is_asked_again_once() -> None:
    """One that is too long is read neither live nor in an answer."""
    h = host(3)
    h.connect()
    h.settle()
    spoiled(h)
    h.wait()
    h.answer(drop=lambda at: at > 2, end=False)
    h.wait()
    assert asked_by_the_check(h) == h.machine.last
    assert (h.resets, h.machine.trust().trusted) == (0, False)


def test_where_the_beginning_is_gone_a_spoiled_message_is_left_alone() -> None:
    h = host(0, keep=10)
    h.connect()
    h.settle()
    spoiled(h)
    for _ in range(8):
        h.live(h.publisher.publish())
    assert asked_by_the_check(h) == 0
    assert asked_by_the_check(h) == h.machine.last
    assert (h.resets, h.machine.trust().trusted) == (0, False)


def test_a_clear_makes_a_spoiled_message_irrelevant() -> None:
    h = host(3)
    h.connect()
    h.settle()
    spoiled(h)
    h.take(h.machine.cleared(h.machine.last))
    assert h.machine.trust().trusted
    assert asked_by_the_check(h) == h.machine.last
    assert h.resets == 0


def test_buffer_of_waiting_messages_is_bounded_and_the_rest_is_asked_again() -> None:
    publisher = Publisher()
    h = Host(publisher, SequenceLimits(max_waiting=4))
    h.connect()
    for _ in range(10):
        h.live(publisher.publish())
    assert len(h.machine._waiting) == 4
    h.answer(drop=lambda at: at > 0)
    assert not h.machine.trust().trusted
    h.settle()
    assert h.applied == h.truth
    assert h.machine.trust().trusted


def test_the_same_live_message_twice_is_applied_once() -> None:
    h = host()
    h.connect()
    h.settle()
    message = h.publisher.publish()
    h.live(message, message)
    assert h.applied == h.truth
    assert h.resets == 0


@pytest.mark.parametrize("method", ["live", "replayed"])
def test_negative_number_is_an_error_that_names_the_state(method: str) -> None:
    h = host()
    with pytest.raises(ProtocolError, match="-1 in state idle"):
        getattr(h.machine, method)(-1, b"", 0.0)


def test_leftovers_of_an_answer_are_dropped_when_nothing_is_asked() -> None:
    h = host(3)
    assert h.machine.replayed(0, b"x", 0.0) == []
    assert h.machine.replay_end(0.0) == []
    h.connect()
    h.settle()
    assert h.machine.replayed(9, b"x", 0.0) == []
    assert h.machine.replay_end(0.0) == []


STEPS = st.lists(
    st.sampled_from(
        [
            "live",
            "live",
            "live",
            "lose",
            "spoil",
            "repeat",
            "swap",
            "answer",
            "cut",
            "wait",
            "drop",
            "restart",
        ]
    ),
    max_size=60,
)


@given(
    steps=STEPS,
    keep=st.sampled_from([3, 10_000]),
    start=st.integers(0, 6),
    seed=st.integers(0, 2**32),
    overlap=st.sampled_from([3, 100]),
)
@settings(max_examples=300, deadline=None)
def test_any_loss_duplication_reordering_and_restart_ends_in_the_true_state(
    steps, keep, start, seed, overlap
) -> None:
    rng = random.Random(seed)
    h = host(start, keep, limits=replace(LIMITS, overlap=overlap))
    h.connect()
    held: list[tuple[int, bytes]] = []
    for step in steps:
        if step == "live":
            h.live(h.publisher.publish(), *held)
            held.clear()
        elif step == "lose":
            h.publisher.publish()
        elif step == "spoil":
            h.live((h.publisher.publish()[0], NOISE))
        elif step == "swap":
            held.append(h.publisher.publish())
        elif step == "repeat" and h.publisher.messages:
            h.live(rng.choice(h.publisher.messages))
        elif step == "answer" and h.request is not None:
            h.answer()
        elif step == "cut" and h.request is not None:
            cut = rng.randrange(1, 5)
            h.answer(drop=lambda at, cut=cut: at >= cut, end=False)
        elif step == "wait" and h.machine.next_deadline() is not None:
            h.request = None
            h.wait()
        elif step == "drop":
            h.take(h.machine.disconnected(h.now))
            h.connect()
        elif step == "restart":
            held.clear()
            h.publisher.restart()
            if keep < 100:  # too little is kept to compare: the lost connection must be noticed
                h.take(h.machine.disconnected(h.now))
                h.connect()
        assert h.trust[-1] == h.machine.trust(), "every change is told"
    h.live(h.publisher.publish())
    h.check()
    h.check()
    read = [payload for payload in h.applied if payload != NOISE]
    assert read == sorted(set(read), key=h.truth.index), "in order, nothing twice, nothing foreign"
    assert h.applied[-1] == h.truth[-1]
    if keep > 60 + start:
        assert h.applied == h.truth
        assert h.machine.trust().trusted
    if h.machine.trust().trusted:
        assert h.applied == h.truth


@given(
    count=st.integers(1, 40),
    keep=st.sampled_from([5, 10_000]),
    whole=st.integers(2, 5),
    seed=st.integers(0, 2**32),
    during=st.integers(0, 5),
    ends=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_short_replays_never_earn_trust_they_do_not_deserve(count, keep, whole, seed, during, ends) -> None:
    """The first `whole` messages of an answer come through; any of the others may be lost, and the marker."""
    rng = random.Random(seed)
    h = host(count, keep)
    h.connect()
    for _ in range(200):
        if h.machine.trust().trusted:  # no hole, and nothing from before the connect is missing
            assert h.applied == h.truth[: len(h.applied)]
            assert len(h.applied) >= count
        if h.request is not None:
            if during and rng.random() < 0.3:
                during -= 1
                message = h.publisher.publish()
                if rng.random() < 0.5:
                    h.live(message)
                    continue
            size = len(h.publisher.replay(h.request))
            if size <= whole:
                h.answer()
            else:
                lost = {at for at in range(whole, size) if rng.random() < 0.5}
                h.answer(drop=lost.__contains__, end=ends or rng.random() < 0.5)
        elif h.machine.state is State.LIVE:
            break
        else:
            h.wait()
    else:
        raise AssertionError("never settled")
    h.check()
    if h.machine.trust().trusted:
        assert h.applied == h.truth


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_publisher_that_lies_is_found_out_by_its_own_live_stream(seed) -> None:
    rng = random.Random(seed)
    h = host(rng.randrange(2, 30))
    hidden = rng.randrange(1, len(h.publisher.messages))
    whole = h.publisher.replay
    h.publisher.replay = lambda start: [m for m in whole(start) if m[0] < hidden]  # type: ignore[method-assign]  # it lies
    h.connect()
    h.settle()
    h.live(h.publisher.publish())
    h.settle()
    assert not h.machine.trust().trusted
    h.live(h.publisher.publish())
    assert not h.machine.trust().trusted


# --- ranks ---------------------------------------------------------------------------------------------


class Ranks(Host):
    """Three ranks share the publisher; what each holds is what it stored since it last cleared."""

    COUNT = 3

    def say(self, kind: str, rank: int) -> tuple[int, bytes]:
        seq, payload = self.publisher.publish()
        self.publisher.messages[seq] = seq, b"%s:%s:%d" % (payload, kind.encode(), rank)
        return self.publisher.messages[seq]

    def apply(self, seq: int, payload: bytes) -> None:
        super().apply(seq, payload)
        if b":clear:" in payload:
            self.take(self.machine.cleared(seq, int(payload[-1:]), range(self.COUNT)))

    def of(self, rank: int, messages: list[bytes]) -> list[bytes]:
        about = [one for one in messages if one != NOISE and int(one[-1:]) == rank]
        cleared = [at for at, one in enumerate(about) if b":clear:" in one]
        return about[cleared[-1] + 1 :] if cleared else about

    def assert_only_what_is_whole_is_trusted(self) -> None:
        for rank in range(self.COUNT):
            if self.machine.trust(rank).trusted:
                assert self.of(rank, self.applied) == self.of(rank, self.truth)


def test_a_clear_restores_the_trust_in_the_rank_that_it_emptied_and_in_no_other() -> None:
    h = Ranks(Publisher(), replay=False)
    h.connect()
    h.live(h.say("store", 0), h.say("store", 1))
    h.say("store", 1)  # lost
    h.live(h.say("store", 0), h.say("clear", 0))
    assert h.machine.trust(0).trusted
    assert h.machine.trust(1) == (False, "messages 2 to 2 are lost: there is no replay endpoint")
    assert not h.machine.trust(2).trusted, "it may have spoken for the first time"
    h.live(h.say("clear", 1))
    assert [h.machine.trust(rank).trusted for rank in range(3)] == [True, True, False]


def test_the_clear_of_one_rank_does_not_end_the_search_for_what_others_lost() -> None:
    h = Ranks(Publisher())
    h.live(h.say("store", 0), h.say("store", 1))
    h.connect()
    h.settle()
    h.live((h.say("store", 1)[0], NOISE), h.say("clear", 0))
    assert [h.machine.trust(rank).trusted for rank in range(2)] == [True, False]
    h.check()
    assert [h.machine.trust(rank).trusted for rank in range(3)] == [True, True, True]
    assert h.applied == h.truth


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "store",
                    "store",
                    "clear",
                    "lose",
                    "lose clear",
                    "spoil",
                    "answer",
                    "wait",
                    "drop",
                    "restart",
                ]
            ),
            st.integers(0, Ranks.COUNT - 1),
        ),
        max_size=40,
    ),
    keep=st.sampled_from([3, 10_000]),
    replay=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_no_rank_is_trusted_about_which_something_is_missing(steps, keep, replay) -> None:
    h = Ranks(Publisher(keep), replace(LIMITS, overlap=3), replay=replay)
    h.connect()
    for step, rank in steps:
        if step in ("store", "clear"):
            h.live(h.say(step, rank))
            h.assert_only_what_is_whole_is_trusted()
        elif step in ("lose", "lose clear"):
            h.say("clear" if "clear" in step else "store", rank)
        elif step == "spoil":
            h.live((h.say("store", rank)[0], NOISE))
        elif step == "answer" and h.request is not None:
            h.answer()
        elif step == "wait" and h.machine.next_deadline() is not None:
            h.request = None
            h.wait()
        elif step in ("drop", "restart"):
            if step == "restart":
                h.publisher.restart()
            h.take(h.machine.disconnected(h.now))
            h.connect()
    h.live(h.say("store", 0))
    if replay:
        h.check()
        h.check()
    h.assert_only_what_is_whole_is_trusted()
    if replay and keep > len(steps):
        assert all(h.machine.trust(rank).trusted for rank in range(Ranks.COUNT))
    for rank in range(Ranks.COUNT):
        h.live(h.say("clear", rank))
        assert h.machine.trust(rank).trusted
    h.assert_only_what_is_whole_is_trusted()


# --- memory --------------------------------------------------------------------------------------------


def heir(host: Host, **options) -> Host:
    """Another process that was given what `host` knows."""
    other = Host(host.publisher, memory=host.machine.memory(), **options)
    other.applied = list(host.applied)
    other.suspended = True  # as the index is told beside it
    return other


def settled(count: int = 30, keep: int = 10_000) -> Host:
    host = Host(Publisher(keep), replace(LIMITS, overlap=4))
    for _ in range(count):
        host.publisher.publish()
    host.connect()
    host.settle()
    return host


def test_an_heir_goes_on_where_the_other_stood():
    first = settled(keep=20)  # what came before can no longer be replayed
    other = heir(first, limits=replace(LIMITS, overlap=4))
    for _ in range(5):
        first.publisher.publish()
    assert other.suspended
    other.connect()
    other.settle()
    assert other.applied == [*first.applied, *(payload for _, payload in first.publisher.messages[-5:])]
    assert (other.resets, other.suspended) == (0, False)
    assert other.machine.last == 34


def test_an_heir_of_what_was_whole_is_trusted_once_the_engine_is_known_to_be_the_same():
    first = settled()
    assert first.machine.trust().trusted
    other = heir(first, limits=replace(LIMITS, overlap=4))
    assert not other.machine.trust().trusted
    other.connect()
    other.settle()
    assert other.machine.trust().trusted
    assert other.applied == first.applied


@pytest.mark.parametrize("since", [3, 30, 60])
def test_an_heir_forgets_all_when_the_engine_restarted(since):
    first = settled()
    other = heir(first, limits=replace(LIMITS, overlap=4))
    first.publisher.restart()
    for _ in range(since):
        first.publisher.publish()
    other.connect()
    other.settle()
    assert other.resets >= 1
    assert other.applied == [payload for _, payload in first.publisher.messages]
    assert not other.suspended


def test_an_heir_of_what_was_unsure_is_not_trusted():
    first = settled(keep=20)
    assert not first.machine.trust().trusted
    other = heir(first, limits=replace(LIMITS, overlap=4))
    other.connect()
    other.settle()
    assert not other.machine.trust().trusted
    assert not other.suspended


def test_a_memory_is_of_no_use_where_nothing_can_be_asked():
    first = settled()
    other = KvSequence(replay=False, memory=first.machine.memory())
    assert other.last == -1
