from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from extproc.core.decode_clock import LONGEST, DecodeClock, Run
from extproc.core.types import LengthEstimate, LengthSource


def run(expected=100.0, *, high=None, limit=None, sequences=1):
    estimate = LengthEstimate(expected, expected if high is None else high, LengthSource.MODEL)
    return Run.of(sequences, estimate, limit)


def started(clock, one, now=0.0):
    clock.announce(one, now, 0.0)
    clock.start(one, now)
    return one


def clock_at(tpot_ms=10.0):
    clock = DecodeClock(0.0)
    clock.pace(tpot_ms, 0.0)
    return clock


def test_every_sequence_gains_one_token_a_step():
    clock = clock_at(10.0)
    first = started(clock, run(1000))
    second = started(clock, run(1000, sequences=3), 0.5)
    assert clock.tokens(1.0) == pytest.approx(100 + 3 * 50)
    assert clock.generated(first, 1.0) == pytest.approx(100)
    assert clock.generated(second, 1.0) == pytest.approx(50)
    assert clock.decoding == 4


def test_who_waits_for_prefill_generates_nothing():
    clock = clock_at()
    waiting = run(1000)
    clock.announce(waiting, 0.0, 2.0)
    assert clock.tokens(1.0) == 0.0
    clock.start(waiting, 1.5)
    assert clock.tokens(2.0) == pytest.approx(50)


def test_steps_get_longer_with_load_and_what_was_made_stays():
    clock = clock_at(10.0)
    started(clock, run(1000))
    clock.pace(20.0, 1.0)
    assert clock.tokens(2.0) == pytest.approx(100 + 50)


def test_without_a_pace_only_signals_count():
    clock = DecodeClock(0.0)
    one = started(clock, run(1000))
    assert clock.tokens(50.0) == 0.0
    clock.correct(one, 30.0, 50.0)
    assert clock.tokens(99.0) == pytest.approx(30)


def test_a_signal_is_true_from_then_on():
    clock = clock_at()
    one = started(clock, run(1000))
    clock.correct(one, 7.0, 1.0)
    assert clock.tokens(1.0) == pytest.approx(7)
    assert clock.tokens(2.0) == pytest.approx(107)
    clock.correct(one, 300.0, 2.0)
    assert clock.tokens(2.0) == pytest.approx(300)


def test_nobody_grows_past_the_limit():
    clock = clock_at()
    short = started(clock, run(10, limit=40))
    started(clock, run(10_000))
    assert clock.generated(short, 60.0) == 40.0
    assert clock.tokens(60.0) == pytest.approx(40 + 6000)
    assert clock.decoding == 1
    clock.stop(short, 60.0)
    assert clock.tokens(60.0) == pytest.approx(6000)
    forgotten = started(clock, run(10), 60.0)
    assert clock.generated(forgotten, 1e6) == LONGEST


def test_a_report_beyond_the_limit_is_believed_and_one_below_it_revives():
    clock = clock_at()
    one = started(clock, run(10, limit=40))
    assert clock.tokens(10.0) == 40.0
    clock.correct(one, 15.0, 10.0)
    assert clock.tokens(10.1) == pytest.approx(25)
    clock.correct(one, 90.0, 10.2)
    assert clock.tokens(99.0) == pytest.approx(90)


def test_steps_shared_are_the_shorter_of_both_lengths():
    clock = clock_at()
    assert clock.beside(100, 0.0) == 0.0
    started(clock, run(1000))
    assert clock.beside(200, 0.0) == pytest.approx(200)
    short = started(clock, run(50, sequences=2))
    # 50 of 200 steps with each of two more; the sum is taken at four points.
    assert clock.beside(200, 0.0) == pytest.approx(200 + 2 * 50, abs=2 * 200 / 8)
    clock.stop(short, 0.5)
    assert clock.beside(200, 9.0) == pytest.approx(100, abs=200 / 8)


def test_context_beside_is_that_of_who_is_still_there_with_what_they_have_generated():
    clock = clock_at()
    assert clock.context_beside(100, 0.0) == 0.0
    long = Run.of(1, LengthEstimate(1000.0, 1000.0, LengthSource.MODEL), None, 500)
    started(clock, long)
    # 500 tokens of prompt and 0 to 200 generated, over 200 steps.
    assert clock.context_beside(200, 0.0) == pytest.approx(200 * (500 + 100))
    assert clock.context_beside(200, 2.0) == pytest.approx(200 * (500 + 200 + 100))
    short = Run.of(2, LengthEstimate(50.0, 50.0, LengthSource.MODEL), None, 4000)
    started(clock, short, 2.0)
    gone = clock.context_beside(200, 2.0) - 200 * 800
    assert gone == pytest.approx(2 * 50 * (2000 + 25), rel=0.05)  # two of 2,000, for a quarter of the steps
    clock.stop(short, 2.0)
    assert clock.context_beside(200, 2.0) == pytest.approx(200 * 800)


def test_who_outlives_the_expectation_is_one_of_the_long_ones():
    clock = clock_at(10.0)
    started(clock, run(100, high=400))
    assert clock.beside(1000, 0.9) == pytest.approx(0, abs=130)
    # Past 100 it is expected to become 400, past that 800, then 1,600.
    assert clock.beside(200, 1.1) == pytest.approx(200)
    assert clock.beside(200, 4.1) == pytest.approx(200)
    assert clock.beside(600, 8.1) == pytest.approx(600)


def test_a_waiting_run_that_should_have_ended_is_still_to_come():
    clock = clock_at()
    waiting = run(100)
    clock.announce(waiting, 0.0, 0.1)
    assert clock.beside(10, 500.0) == pytest.approx(10)
    clock.start(waiting, 500.0)
    assert clock.beside(50, 500.0) == pytest.approx(50)


def test_reading_changes_no_answer():
    def answers(reads):
        rng, clock, runs, out = Random(3), clock_at(), [], []
        for n in range(120):
            now = n * 0.05
            for k in range(reads):
                clock.tokens(now - 0.05 + k * 0.05 / reads)
                clock.beside(77, now - 0.05 + k * 0.05 / reads)
            if n % 3 == 0:
                runs.append(started(clock, run(rng.choice((5, 40, 300)), high=310, limit=2000), now))
            elif n % 7 == 0:
                clock.stop(runs.pop(rng.randrange(len(runs))), now)
            clock.pace(5.0 + clock.decoding, now)
            out += [clock.tokens(now), clock.beside(200, now)]
        return out

    assert answers(5) == pytest.approx(answers(0))


@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3), st.booleans()), max_size=12),
    st.integers(1, 3000),
    st.floats(1, 4000),
    st.floats(0, 20),
)
def test_one_more_sequence_never_means_less_load(others, extra, length, now):
    clock = clock_at()
    for expected, sequences, decodes in others:
        one = run(expected, high=3000.0, sequences=sequences)
        clock.announce(one, 0.0, 0.0)
        if decodes:
            clock.start(one, 0.0)
    before = clock.tokens(now), clock.beside(length, now), clock.context_beside(length, now)
    clock.announce(run(extra), now, 0.0)
    assert clock.context_beside(length, now) >= before[2] * (1 - 1e-9)
    assert clock.tokens(now) >= before[0]
    assert clock.beside(length, now) >= before[1]
    most = length * (1 + sum(sequences for _, sequences, _ in others))
    assert clock.beside(length, now) <= most * (1 + 1e-9)


class ClockMachine(RuleBasedStateMachine):
    """Against a list of runs, each with its own count."""

    runs = Bundle("runs")

    def __init__(self):
        super().__init__()
        self.clock = clock_at(10.0)
        self.now = 0.0
        self.generated = {}
        self.begun = set()

    @rule(
        target=runs,
        expected=st.integers(1, 300),
        limit=st.none() | st.integers(1, 400),
        sequences=st.integers(0, 3),
    )
    def announce(self, expected, limit, sequences):
        one = run(expected, high=350.0, limit=limit, sequences=sequences)
        self.clock.announce(one, self.now, 0.1)
        self.generated[one] = 0.0
        return one

    @rule(one=runs)
    def start(self, one):
        if one in self.generated:
            self.clock.start(one, self.now)
            self.begun.add(one)

    @rule(one=runs, tokens=st.integers(0, 500))
    def correct(self, one, tokens):
        if one in self.begun:
            self.clock.correct(one, tokens, self.now)
            self.generated[one] = tokens

    @rule(one=consumes(runs))
    def stop(self, one):
        if self.generated.pop(one, None) is not None:
            self.clock.stop(one, self.now)
            self.begun.discard(one)

    @rule(seconds=st.floats(0, 3), read=st.booleans())
    def wait(self, seconds, read):
        self.now += seconds
        for one in self.begun:
            self.generated[one] = min(one.limit, self.generated[one] + seconds * 100.0)
        if read:
            self.clock.beside(60, self.now)

    @invariant()
    def agrees(self):
        total = sum(one.sequences * tokens for one, tokens in self.generated.items())
        assert self.clock.tokens(self.now) == pytest.approx(total, abs=1e-3)
        for one, tokens in self.generated.items():
            assert self.clock.generated(one, self.now) == pytest.approx(tokens, abs=1e-3)
        if not self.begun:
            assert self.clock.tokens(self.now) == pytest.approx(0.0, abs=1e-9)
        most = 60 * sum(one.sequences for one in self.generated)
        assert 0.0 <= self.clock.beside(60, self.now) <= most


TestClockMachine = ClockMachine.TestCase
TestClockMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
