import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.divergence import Audit, Cause
from extproc.core.namespace import Namespace
from extproc.core.trust import MEMORY_S, SILENT_S, TrustBook, Verdict
from tests.support.core import BLOCK, NAMESPACE, worker

OTHER = Namespace("model", "tokenizer", adapter="a")


def audit(book, predicted, actual, now, *, n=0, namespace=NAMESPACE, computed=1, complete=True):
    return book.audit(
        worker(n),
        Audit(now, predicted, actual, namespace, BLOCK, 200, 200),
        computed_blocks=computed,
        admitted_at=now - 0.5,
        complete=complete,
    )


def test_confidence_is_one_until_there_are_enough_audits_then_what_was_found():
    book = TrustBook()
    for now in range(3):
        audit(book, 100, 50, float(now))
    assert book.confidence(worker(0), NAMESPACE, 3.0) == 1.0
    audit(book, 100, 50, 3.0)
    assert book.confidence(worker(0), NAMESPACE, 3.0) == pytest.approx(0.5)


def test_finding_more_than_predicted_is_no_reason_to_believe_more():
    book = TrustBook()
    for now in range(8):
        audit(book, 100, 500 if now % 2 else 50, float(now))
    assert book.confidence(worker(0), NAMESPACE, 8.0) == pytest.approx(0.75)


def test_one_workers_faults_are_not_anothers_nor_one_namespaces():
    book = TrustBook()
    for now in range(8):
        audit(book, 100, 0, float(now), n=0, namespace=OTHER)
        audit(book, 100, 100, float(now), n=0)
        audit(book, 100, 100, float(now), n=1)
    assert book.confidence(worker(0), OTHER, 8.0) == 0.0
    assert book.confidence(worker(0), NAMESPACE, 8.0) == 1.0
    assert book.confidence(worker(1), NAMESPACE, 8.0) == 1.0
    # What fails with this namespace wherever it was tried is not believed elsewhere.
    assert book.confidence(worker(1), OTHER, 8.0) == 0.0


def test_a_namespace_that_fails_on_one_worker_and_holds_on_another_is_believed_elsewhere():
    book = TrustBook()
    for now in range(8):
        audit(book, 100, 0, float(now), n=0)
        audit(book, 100, 90, float(now), n=1)
    assert book.confidence(worker(0), NAMESPACE, 8.0) == 0.0
    assert book.confidence(worker(2), NAMESPACE, 8.0) == pytest.approx(0.9)
    book.forget(worker(1))
    assert book.confidence(worker(2), NAMESPACE, 8.0) == 0.0


def test_a_worker_that_fails_everywhere_is_not_believed_in_a_new_namespace():
    book = TrustBook()
    for now in range(8):
        audit(book, 100, 25, float(now), n=0)
    assert book.confidence(worker(0), OTHER, 8.0) == pytest.approx(0.25)


def test_old_audits_are_forgotten():
    book = TrustBook()
    for now in range(8):
        audit(book, 100, 0, float(now))
    assert book.confidence(worker(0), NAMESPACE, 9.0 + MEMORY_S) == 1.0


def test_a_stream_that_dies_without_a_sound_is_noticed():
    book = TrustBook()
    book.on_events(worker(0), 0.0)
    verdicts = [audit(book, 0, 0, now) for now in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    assert verdicts == [Verdict.FINE, Verdict.FINE, Verdict.SILENT, *[Verdict.FINE] * 3]
    assert book.is_silent(worker(0))
    assert book.diagnosis(worker(0), 6.0).cause is Cause.EVENTS_MISSING
    book.on_events(worker(0), 7.0)
    assert not book.is_silent(worker(0))


def test_requests_whose_ends_are_heard_of_all_at_once_prove_no_silence():
    """After a stall the events of all of them may be waiting to be read."""
    book = TrustBook()
    book.on_events(worker(0), 0.0)
    assert [audit(book, 0, 0, 5.0 + n / 100) for n in range(20)] == [Verdict.FINE] * 20
    book.on_events(worker(0), 5.3)
    assert [audit(book, 0, 0, 6.0 + n / 100) for n in range(20)] == [Verdict.FINE] * 20
    assert audit(book, 0, 0, 6.0 + SILENT_S) is Verdict.SILENT


def test_events_or_requests_without_new_blocks_are_no_silence():
    book = TrustBook()
    for now in range(1, 20):
        if now % 3 == 0:
            book.on_events(worker(0), now - 0.2)
        assert audit(book, 0, 0, float(now), computed=now % 2) is Verdict.FINE


def test_a_worker_that_never_published_is_not_silent():
    book = TrustBook()
    assert {audit(book, 0, 0, float(now)) for now in range(10)} == {Verdict.FINE}


def test_lost_events_and_wrong_predictions_together_disprove():
    book = TrustBook()
    book.on_events(worker(0), 0.9)
    assert audit(book, 100, 40, 1.0, complete=False) is Verdict.FINE
    book.on_events(worker(0), 1.9)
    assert audit(book, 100, 40, 2.0, complete=False) is Verdict.DISPROVED
    book.on_events(worker(0), 2.9)
    assert audit(book, 100, 40, 3.0, complete=False) is Verdict.FINE


def test_wrong_predictions_of_a_complete_stream_lower_confidence_only():
    book = TrustBook()
    for now in range(20):
        book.on_events(worker(0), now - 0.1)
        assert audit(book, 100, 40, float(now)) is Verdict.FINE
    assert book.confidence(worker(0), NAMESPACE, 20.0) == pytest.approx(0.4)


def test_lasting_divergence_names_its_likely_cause():
    book = TrustBook()
    assert book.complaint(worker(0), 0.0) is None
    for now in range(10):
        audit(book, 0, 64, float(now), n=0)
        audit(book, 64, 0, float(now), n=1)
        audit(book, 64, 64, float(now), n=2)
    assert "events are missing" in book.complaint(worker(0), 10.0)
    assert book.diagnosis(worker(1), 10.0).message == book.complaint(worker(1), 10.0)
    assert book.complaint(worker(2), 10.0) is None
    assert book.complaint(worker(1), 11.0 + MEMORY_S) is None


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=60))
def test_confidence_stays_between_nothing_and_everything(pairs):
    book = TrustBook()
    for now, (predicted, actual) in enumerate(pairs):
        audit(book, predicted, actual, float(now))
        assert 0.0 <= book.confidence(worker(0), NAMESPACE, float(now)) <= 1.0
