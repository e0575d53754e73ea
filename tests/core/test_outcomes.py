import pytest

from extproc.core.load_ledger import LoadLedger
from extproc.core.outcomes import STOPPED, Released, is_leak, suspects
from extproc.core.types import Completion, Outcome
from tests.support.core import decision, worker


def lease_on(n=0, **fields):
    return LoadLedger().admit(decision("a", n, **fields), 1, (), 0.0, 1e9)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (Completion(Outcome.FINISHED, served_by=worker(0).endpoint, attempts=1), ()),
        (Completion(Outcome.FINISHED, served_by=worker(1).endpoint, attempts=2), (worker(0).endpoint,)),
        (Completion(Outcome.FAILED, served_by=worker(1).endpoint), (worker(1).endpoint,)),
        (Completion(Outcome.FAILED), (worker(0).endpoint,)),
        (Completion(Outcome.FAILED, served_by=worker(0).endpoint, labels={"time_limit": "x"}), ()),
        (Completion(Outcome.CANCELLED, served_by=worker(0).endpoint), ()),
        (Completion(Outcome.REJECTED), ()),
        (
            Completion(Outcome.REJECTED, labels={"tried": worker(1).endpoint}),
            (worker(0).endpoint, worker(1).endpoint),
        ),
    ],
)
def test_who_is_suspected(completion, expected):
    assert suspects(lease_on(0), completion) == expected


def test_what_a_stop_cuts_off_is_no_leak():
    assert is_leak(Completion(Outcome.LOST, details="no access log entry came"))
    assert not is_leak(STOPPED)
    assert not is_leak(Completion(Outcome.FAILED))


def test_batches_are_not_compared():
    done = Completion(Outcome.FINISHED, cached_tokens=0)
    assert Released(lease_on(sequences=2), done, 1.0).prediction_was_exact is None
