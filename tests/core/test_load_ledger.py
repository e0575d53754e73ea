from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from extproc.core.cost import RequestFacts, WorkerFacts
from extproc.core.leases import IDLE
from extproc.core.load_ledger import LoadLedger
from extproc.core.step_model import StepCoefficients
from extproc.core.ttft_model import TtftCoefficients
from extproc.core.types import CostBreakdown, Priced
from tests.support.core import candidate, decision, worker


def admit(ledger, lease_id, n=0, now=0.0, **fields):
    return ledger.admit(decision(lease_id, n, now=now, **fields), 1, (), now, now + 100.0)


def test_prefill_is_a_queue_that_drains_with_time():
    ledger = LoadLedger()
    admit(ledger, "a", prefill_ms=100.0, uncovered=100)
    admit(ledger, "b", prefill_ms=50.0, uncovered=50)
    assert ledger.load(worker(), 0.0).queued_prefill_ms == pytest.approx(150.0)
    assert ledger.load(worker(), 0.06).queued_prefill_tokens == pytest.approx(90.0)
    assert ledger.load(worker(), 0.12).queued_prefill_ms == pytest.approx(30.0)
    assert ledger.load(worker(), 9.0).queued_prefill_ms == 0.0
    assert ledger.load(worker(), 9.0).active == 2


def test_prefill_does_not_begin_before_the_step_under_way_has_ended():
    ttft, step = TtftCoefficients(40.0, 5.0, 1.0, 0.0), StepCoefficients(10.0, 0.1, 0.0)
    facts = WorkerFacts(
        ttft, 0.0, 0, sequences=2, context_tokens=0, held_tokens=0, capacity_tokens=None, step=step
    )
    ledger = LoadLedger()
    for lease_id in "ab":
        made = decision(lease_id, prefill_ms=100.0)
        priced = Priced(RequestFacts(100, 100, 0, 0, 1.0, 1), facts)
        chosen = replace(made.chosen, priced=priced)
        ledger.admit(replace(made, candidates=(chosen,)), 1, (), 0.0, 600.0)
    queued = [ledger.load(worker(), now).queued_prefill_ms for now in (0.0, 0.05, 0.1, 0.25, 0.3)]
    assert queued == pytest.approx([200.0, 200.0, 150.0, 0.0, 0.0])


def test_an_early_end_moves_those_behind_forward():
    ledger = LoadLedger()
    admit(ledger, "a", prefill_ms=100.0)
    behind = admit(ledger, "b", prefill_ms=50.0)
    ledger.release("a", 0.02)
    assert behind.prefill_start == pytest.approx(0.02)
    assert ledger.load(worker(), 0.02).queued_prefill_ms == pytest.approx(50.0)


def test_a_cancelled_waiting_request_does_not_disturb_the_one_before_it():
    ledger = LoadLedger()
    first = admit(ledger, "a", prefill_ms=100.0)
    admit(ledger, "b", prefill_ms=50.0)
    ledger.release("b", 0.02)
    assert first.prefill_end == pytest.approx(0.1)
    assert ledger.load(worker(), 0.02).queued_prefill_ms == pytest.approx(80.0)


def test_first_token_ends_prefill_once():
    ledger = LoadLedger()
    admit(ledger, "a", prefill_ms=100.0)
    assert ledger.first_token("a", 0.01) is not None
    assert ledger.first_token("a", 0.02) is None
    assert ledger.load(worker(), 0.02).queued_prefill_ms == 0.0


def test_generated_tokens_are_load():
    ledger = LoadLedger()
    admit(ledger, "a", prompt_tokens=100)
    ledger.progress("a", 40, 0.0)
    assert ledger.load(worker(), 0.0).context_tokens == 140


def test_pitfall_55_release_without_admit_changes_nothing():
    ledger = LoadLedger()
    assert ledger.release("never", 0.0) is None
    assert ledger.load(worker(), 0.0) == IDLE


def test_a_worker_that_left_takes_its_leases_along():
    ledger = LoadLedger()
    admit(ledger, "a")
    assert [lease.id for lease in ledger.drop_worker(worker())] == ["a"]
    admit(ledger, "b", now=5.0)
    assert ledger.release("a", 6.0) is None
    assert ledger.load(worker(), 6.0).active == 1


def test_one_lease_per_id():
    ledger = LoadLedger()
    admit(ledger, "a")
    with pytest.raises(ValueError, match="open already"):
        admit(ledger, "a", n=1)


def test_without_signals_decoding_progresses_as_expected():
    ledger = LoadLedger(lambda worker, sequences, context: 10.0 * sequences)
    admit(ledger, "a", prompt_tokens=100, prefill_ms=200.0, output=1000.0)
    assert ledger.load(worker(), 0.2).context_tokens == 100
    assert ledger.load(worker(), 1.2).context_tokens == 200
    # From here on there are two in the batch, and a step takes twice as long.
    admit(ledger, "b", prompt_tokens=50, prefill_ms=0.0, output=1000.0, now=1.2)
    ledger.first_token("b", 1.2)
    assert ledger.load(worker(), 2.2).context_tokens == 200 + 50 + 50 + 50
    ledger.release("a", 2.2)
    assert ledger.load(worker(), 3.2).context_tokens == 50 + 50 + 100


def test_signals_correct_what_was_expected():
    ledger = LoadLedger(lambda *_: 10.0)
    lease = admit(ledger, "a", prompt_tokens=100, prefill_ms=0.0, output=1000.0)
    assert ledger.generated_tokens(lease, 1.0) == pytest.approx(100)
    ledger.first_token("a", 1.0)  # it had not begun at all
    assert ledger.load(worker(), 1.0).context_tokens == 100
    ledger.progress("a", 30, 2.0)
    assert ledger.load(worker(), 2.0).context_tokens == 130
    ledger.progress("a", 5, 2.5)
    assert ledger.load(worker(), 3.0).context_tokens == 100 + 35 + 50


def test_progress_is_a_first_token_whose_signal_was_lost():
    ledger = LoadLedger(lambda *_: 10.0)
    admit(ledger, "a", prefill_ms=5000.0)
    ledger.progress("a", 3, 0.1)
    assert ledger.load(worker(), 0.1).queued_prefill_ms == 0.0
    assert ledger.first_token("a", 0.2) is None


def test_what_is_about_to_end_shares_fewer_steps_than_what_goes_on():
    ledger = LoadLedger(lambda *_: 10.0)
    admit(ledger, "short", 0, prefill_ms=0.0, output=50.0)
    admit(ledger, "long", 1, prefill_ms=0.0, output=5000.0)
    assert ledger.steps_beside(worker(0), 1000.0, 0.0) < ledger.steps_beside(worker(1), 1000.0, 0.0)
    assert ledger.steps_beside(worker(1), 1000.0, 0.0) == pytest.approx(1000.0)
    assert ledger.steps_beside(worker(2), 1000.0, 0.0) == 0.0
    contexts = [ledger.context_beside(worker(n), 1000.0, 0.0) for n in range(3)]
    assert contexts[0] < contexts[1] == pytest.approx(1000.0 * (100 + 500))
    assert contexts[2] == 0.0


def test_a_retry_elsewhere_takes_its_load_along():
    ledger = LoadLedger(lambda *_: 10.0)
    lease = admit(ledger, "a", prompt_tokens=100, prefill_ms=500.0, output=50.0)
    ledger.move("a", candidate(1, uncovered=40, cost=CostBreakdown(0.0, 200.0, 0.0, 0.0)), 7, (), 0.1)
    assert ledger.load(worker(0), 0.1) == IDLE
    there = ledger.load(worker(1), 0.1)
    assert (there.active, there.context_tokens, there.queued_prefill_ms) == (1, 100, pytest.approx(200.0))
    assert (lease.worker, lease.generation, lease.uncovered_tokens) == (worker(1), 7, 40)
    assert ledger.drop_worker(worker(0)) == ()
    assert ledger.release("a", 0.2) is lease
    assert ledger.load(worker(1), 0.2) == IDLE


def test_shared_blocks_are_private_to_nobody():
    ledger = LoadLedger()
    chain = tuple(range(5))  # 80 tokens
    for lease_id in ("a", "b"):
        ledger.admit(decision(lease_id, prompt_tokens=100), 1, (chain,), 0.0, 9.0)
    load = ledger.load(worker(), 0.0)
    assert (load.context_tokens, load.private_tokens) == (200, 40)


def test_it_is_known_how_many_tokens_were_sent_and_how_many_of_them_computed():
    ledger = LoadLedger()
    assert (ledger.sent_tokens(worker(0)), ledger.computed_tokens(worker(0), 0.0)) == (0, 0)
    admit(ledger, "a", uncovered=300, prefill_ms=100.0)
    admit(ledger, "b", uncovered=500, prefill_ms=100.0)
    seen = [ledger.computed_tokens(worker(0), now) for now in (0.0, 0.15, 0.25)]
    assert (seen, ledger.sent_tokens(worker(0))) == ([0, 300, 800], 800)
    ledger.release("a", 1.0)
    ledger.release("b", 1.0)
    assert ledger.sent_tokens(worker(0)) == ledger.computed_tokens(worker(0), 1.0) == 800
    ledger.drop_worker(worker(0))
    assert ledger.sent_tokens(worker(0)) == 0


def unfinished(lease, now):
    whole = lease.prefill_end - lease.prefill_start
    return lease.unfinished_prefill_s(now) / whole if whole > 0.0 else 1.0


class LedgerMachine(RuleBasedStateMachine):
    """Any interleaving: never negative, each lease released once, empty after drain."""

    leases = Bundle("leases")

    tpot = None  # nothing progresses but by signals

    def __init__(self):
        super().__init__()
        self.ledger = LoadLedger(self.tpot)
        self.now = 0.0
        self.count = 0
        self.open = {}
        self.released = []

    @rule(
        target=leases,
        n=st.integers(0, 2),
        prefill=st.integers(0, 500),
        tokens=st.integers(0, 1000),
        sequences=st.integers(1, 3),
    )
    def admit(self, n, prefill, tokens, sequences):
        self.count += 1
        lease_id = str(self.count)
        admit(
            self.ledger, lease_id, n, self.now, prompt_tokens=tokens, prefill_ms=prefill, sequences=sequences
        )
        self.open[lease_id] = [n, tokens, sequences]
        return lease_id

    @rule(step=st.floats(0, 0.4))
    def wait(self, step):
        self.now += step

    @rule(lease=leases)
    def first_token(self, lease):
        found = self.ledger.first_token(lease, self.now)
        assert found is None or lease in self.open

    @rule(lease=leases, tokens=st.integers(-5, 50))
    def progress(self, lease, tokens):
        self.ledger.progress(lease, tokens, self.now)
        if lease in self.open:
            self.open[lease][1] += max(0, tokens)

    @rule(lease=leases, n=st.integers(0, 2), prefill=st.integers(0, 500))
    def served_elsewhere(self, lease, n, prefill):
        there = candidate(n, cost=CostBreakdown(0.0, float(prefill), 0.0, 0.0))
        self.ledger.move(lease, there, 1, (), self.now)
        if lease in self.open:
            self.open[lease][0] = n

    @rule(lease=consumes(leases) | leases)
    def release(self, lease):
        found = self.ledger.release(lease, self.now)
        assert (found is not None) == (self.open.pop(lease, None) is not None)
        if found is not None:
            assert lease not in self.released
            self.released.append(lease)

    @rule(n=st.integers(0, 2))
    def worker_leaves(self, n):
        gone = {lease.id for lease in self.ledger.drop_worker(worker(n))}
        assert gone == {i for i, (at, _, _) in self.open.items() if at == n}
        for lease in gone:
            del self.open[lease]

    @invariant()
    def agrees_with_the_list_of_open_requests(self):
        assert len(self.ledger) == len(self.open)
        for n in range(3):
            mine = [x for x in self.open.values() if x[0] == n]
            load = self.ledger.load(worker(n), self.now)
            assert load.active == len(mine)
            self.context_agrees(load, mine)
            assert load.sequences == sum(x[2] for x in mine)
            assert load.queued_prefill_ms >= 0.0
            assert load.queued_prefill_tokens == pytest.approx(
                sum(
                    lease.uncovered_tokens * unfinished(lease, self.now)
                    for lease in self.ledger.leases(worker(n))
                    if lease.first_token_at is None and lease.prefill_end > self.now
                ),
                abs=1e-6,
            )
            assert self.ledger.sequences(worker(n)) == load.sequences
            if not mine:
                assert load == IDLE

    def context_agrees(self, load, mine):
        assert load.context_tokens == sum(x[1] for x in mine)

    @invariant()
    def prefill_intervals_do_not_overlap(self):
        for n in range(3):
            end = 0.0
            for lease in self.ledger.leases(worker(n)):
                if lease.first_token_at is None:
                    assert lease.prefill_end >= lease.prefill_start - 1e-9
                    assert lease.prefill_start >= end - 1e-9 or lease.prefill_start <= self.now
                    end = max(end, lease.prefill_end)

    def teardown(self):
        for lease in list(self.open):
            assert self.ledger.release(lease, self.now) is not None
        assert len(self.ledger) == 0
        assert all(self.ledger.load(worker(n), self.now) == IDLE for n in range(3))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class ProgressingMachine(LedgerMachine):
    """The same where decoding is expected to progress, at a pace that changes with the load."""

    tpot = staticmethod(lambda worker, sequences, context: 5.0 + sequences + context / 1000.0)

    def context_agrees(self, load, mine):
        prompts = sum(
            lease.decision.request.prompt_tokens for lease in self.ledger.leases(self.worker_of(mine))
        )
        generated = sum(
            self.ledger.generated_tokens(lease, self.now)
            for lease in self.ledger.leases(self.worker_of(mine))
        )
        assert load.context_tokens == pytest.approx(prompts + generated, abs=1.0)
        assert 0 <= load.private_tokens <= load.context_tokens

    def worker_of(self, mine):
        return worker(mine[0][0]) if mine else worker(99)

    @invariant()
    def nothing_is_negative_and_reports_are_minima(self):
        for lease in self.ledger:
            assert self.ledger.generated_tokens(lease, self.now) >= lease.reported_tokens - 1e-6
        for n in range(3):
            assert self.ledger.steps_beside(worker(n), 100.0, self.now) >= 0.0


TestProgressingMachine = ProgressingMachine.TestCase
TestProgressingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
