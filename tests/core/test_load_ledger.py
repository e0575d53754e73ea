import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from extproc.core.load_ledger import IDLE, LoadLedger
from tests.support.core import decision, worker


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


def unfinished(lease, now):
    whole = lease.prefill_end - lease.prefill_start
    return lease.unfinished_prefill_s(now) / whole if whole > 0.0 else 1.0


class LedgerMachine(RuleBasedStateMachine):
    """Any interleaving: never negative, each lease released once, empty after drain."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.ledger = LoadLedger()
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
            assert load.context_tokens == sum(x[1] for x in mine)
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
