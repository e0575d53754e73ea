import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.load_ledger import LoadLedger
from tests.support.core import decision, worker

TPOT_MS = 10.0


def ledger_with(*prefill_ms, expected=1000.0):
    """Requests that came at 0, in this order, each token in 10 ms."""
    ledger = LoadLedger(lambda *_: TPOT_MS)
    for number, each in enumerate(prefill_ms):
        admit(ledger, str(number), 0.0, each, expected)
    return ledger


def admit(ledger, lease_id, now, prefill_ms, expected=1000.0):
    made = decision(lease_id, 0, now=now, prefill_ms=prefill_ms, uncovered=100, output=expected)
    return ledger.admit(made, 1, (), now, now + 600.0)


def generated(ledger, lease_id, now):
    return ledger.generated_tokens(ledger.get(lease_id), now)


def test_who_has_been_computed_generates_at_the_pace_of_all():
    ledger = ledger_with(0.0, 300.0)
    seen = [(generated(ledger, "0", now), generated(ledger, "1", now)) for now in (0.0, 0.3, 0.5)]
    assert seen == [pytest.approx(pair) for pair in ((0.0, 0.0), (30.0, 0.0), (50.0, 20.0))]


def test_prefill_that_is_taken_back_is_given_to_those_behind():
    ledger = ledger_with(0.0)
    admit(ledger, "sooner", 1.0, 500.0)
    admit(ledger, "behind", 1.0, 300.0)
    ledger.first_token("sooner", 1.1)
    assert ledger.load(worker(), 1.1).queued_prefill_ms == pytest.approx(300.0)
    assert generated(ledger, "behind", 1.5) == pytest.approx(10.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 0.5)), max_size=40), st.lists(st.floats(0, 9)))
def test_what_has_been_generated_never_becomes_less_and_reading_changes_nothing(steps, looks):
    """Kinds of steps: 0, 1: a prompt comes; 2: the oldest one's first token; 3: it leaves."""

    def run(looked):
        ledger, now, seen, open_leases = ledger_with(0.0), 0.0, [], []
        for number, (kind, wait) in enumerate(steps):
            now += wait
            for look in looked:
                ledger.load(worker(), now - wait + wait * look / 9.0)
            if kind < 2:
                admit(ledger, f"p{number}", now, 400.0 * wait)
                open_leases.append(f"p{number}")
            elif open_leases and kind == 2:
                ledger.first_token(open_leases[0], now)
            elif open_leases:
                ledger.release(open_leases.pop(0), now)
            seen.append(generated(ledger, "0", now))
        return seen

    seen = run(())
    assert seen == pytest.approx(sorted(seen))
    assert run(sorted(looks)) == pytest.approx(seen)


def test_reading_a_load_costs_the_same_however_many_leases_there_are():
    class Counting(dict):
        reads = 0

        def values(self):
            Counting.reads += 1
            return super().values()

    ledger = ledger_with(*[1.0] * 300)
    book = ledger._books[worker()]
    book.leases = Counting(book.leases)
    for n in range(20):
        ledger.load(worker(), 0.01 * n)
        ledger.steps_beside(worker(), 500.0, 0.01 * n)
    assert Counting.reads == 0
