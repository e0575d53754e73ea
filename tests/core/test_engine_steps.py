import itertools
import math
from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.engine_steps import EngineSteps, Mark
from extproc.core.load_ledger import LoadLedger
from extproc.core.peer_loads import NOTHING_TOLD, ToldLoad
from tests.support.core import decision, metrics, worker


def noted(*scrapes):
    """What is known after scrapes a second apart, each (tokens generated, prompt tokens computed)."""
    steps = EngineSteps()
    for now, (generated, computed) in enumerate(scrapes):
        steps.note(metrics(generation_tokens=generated), Mark(float(now), computed, 0))
    return steps


def test_before_the_second_scrape_nothing_is_in_the_figures():
    assert noted().unseen(700, NOTHING_TOLD) == 700
    assert noted((5.0, 700)).unseen(700, NOTHING_TOLD) == 700


def test_figures_that_are_new_at_every_scrape_tell_what_was_computed_a_scrape_before():
    steps = noted((1.0, 100), (2.0, 300), (3.0, 600))
    assert (steps.seen.at, steps.unseen(1000, NOTHING_TOLD)) == (1.0, 700)


def test_figures_that_stand_still_are_of_the_time_of_their_last_change():
    steps = noted((1.0, 100), (2.0, 300), *[(2.0, 900)] * 30)
    assert (steps.seen.at, steps.unseen(1000, NOTHING_TOLD)) == (0.0, 900)


def test_a_step_that_ends_after_a_standstill_may_have_begun_before_it():
    steps = noted((1.0, 100), (2.0, 300), (2.0, 500), (2.0, 700), (3.0, 900))
    assert steps.seen.at == 0.0
    steps.note(metrics(generation_tokens=4.0), Mark(5.0, 950, 0))
    assert (steps.seen.at, steps.seen.computed) == (4.0, 900)


def test_an_engine_without_counters_is_taken_to_end_a_step_before_each_scrape():
    steps = noted((None, 100), (None, 300), (None, 600))
    assert steps.seen == Mark(1.0, 300, 0)


def test_changes_tell_when_the_engine_has_ended_two_steps():
    steps = noted((1.0, 0), (2.0, 0), (2.0, 0), (3.0, 0))
    assert (steps.last.at, steps.last_but_one.at) == (2.0, 0.0)
    assert noted((1.0, 0), (2.0, 0)).last_but_one.at == -math.inf


def test_of_other_routers_counts_what_is_queued_or_what_they_hold_more():
    steps = EngineSteps(seen=Mark(0.0, 0, 1000))
    assert steps.unseen(0, ToldLoad(context_tokens=1500, queued_prefill_tokens=200.0)) == 500
    assert steps.unseen(0, ToldLoad(context_tokens=1100, queued_prefill_tokens=200.0)) == 200
    assert steps.unseen(0, ToldLoad(context_tokens=400)) == 0


class Engine:
    """Computes two tokens a millisecond, all that waits when a step begins in one step; nothing ever ends."""

    def __init__(self, arrivals):
        self.begun, self.ended, self.holds = [], [], [0]
        free, waiting = 0.0, list(arrivals)
        while waiting:
            begins = max(free, waiting[0][0])
            taken = [tokens for at, tokens in waiting if at <= begins]
            del waiting[: len(taken)]
            free = begins + sum(taken) / 2000.0
            self.begun.append(begins)
            self.ended.append(free)
            self.holds.append(self.holds[-1] + sum(taken))

    def scrape(self, now):
        steps = bisect_right(self.ended, now)
        return metrics(generation_tokens=float(steps)), self.holds[steps]

    def holds_after_this_step(self, now):
        return self.holds[bisect_right(self.begun, now)]


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 4000)), max_size=30), st.floats(0.2, 2.0))
def test_nothing_that_a_working_engine_holds_is_missed(gaps, interval):
    """With a clock that is no faster than the engine."""
    times = itertools.accumulate(gap for gap, _ in gaps)
    arrivals = [(at, tokens) for at, (_, tokens) in zip(times, gaps, strict=True)]
    engine, ledger, steps = Engine(arrivals), LoadLedger(), EngineSteps()
    scrapes = [interval * n for n in range(int((arrivals[-1][0] if arrivals else 0.0) / interval) + 20)]
    told = 0
    for now, tokens in sorted([*arrivals, *((at, 0) for at in scrapes)], key=lambda x: (x[0], not x[1])):
        if tokens:
            lease_id = str(len(ledger))
            chosen = decision(lease_id, prompt_tokens=tokens, prefill_ms=tokens, uncovered=tokens)
            ledger.admit(chosen, 1, (), now, 1e9)
        else:
            figures, told = engine.scrape(now)
            steps.note(figures, Mark(now, ledger.computed_tokens(worker(0), now), 0))
        sent = ledger.sent_tokens(worker(0))
        assert told + steps.unseen(sent, NOTHING_TOLD) >= min(sent, engine.holds_after_this_step(now))
