import pytest

from extproc.core.divergence import MANY, Audit, Cause, diagnose
from extproc.core.namespace import Namespace
from tests.support.core import NAMESPACE

ADAPTER = Namespace("model", "tokenizer", adapter="a")
SALT = Namespace("model", "tokenizer", cache_salt="s")


def audits(*pairs, namespace=NAMESPACE, counted=200, reported=200, block_size=16):
    return [
        Audit(float(n), predicted, actual, namespace, block_size, counted, reported)
        for n, (predicted, actual) in enumerate(pairs)
    ]


def cause(found, *, events=True):
    complaint = diagnose(found, events=events)
    return None if complaint is None else complaint.cause


def test_what_holds_or_is_too_little_to_tell_is_no_complaint():
    assert cause(audits(*[(64, 64)] * 20)) is None
    assert cause(audits(*[(64, 0)] * (MANY - 1))) is None
    assert cause(audits(*[(0, 0)] * 20)) is None


def test_another_number_of_prompt_tokens_is_another_tokenizer():
    assert cause(audits(*[(64, 64)] * 10, reported=203)) is Cause.TOKENIZER
    assert cause(audits(*[(64, 64)] * 10, reported=None)) is None
    message = diagnose(audits(*[(64, 64)] * 10, reported=203), events=True).message
    assert "203 where 200" in message


def test_hits_that_end_inside_our_blocks_are_another_block_size():
    assert cause(audits(*[(64, 48)] * 10, block_size=64)) is Cause.BLOCK_SIZE


@pytest.mark.parametrize(
    ("namespace", "events", "expected"),
    [
        (NAMESPACE, False, Cause.EVENTS_MISSING),
        (NAMESPACE, True, Cause.TOKENIZER),
        (ADAPTER, True, Cause.NAMESPACE),
        (SALT, True, Cause.NAMESPACE),
    ],
)
def test_more_hits_than_predicted(namespace, events, expected):
    assert cause(audits(*[(0, 64)] * 10, namespace=namespace), events=events) is expected


def test_only_requests_with_an_adapter_or_salt_miss():
    fine = audits(*[(64, 64)] * 6)
    assert cause(fine + audits(*[(640, 0)] * 6, namespace=ADAPTER)) is Cause.NAMESPACE
    assert cause(audits(*[(64, 0)] * 10, namespace=SALT)) is Cause.NAMESPACE


def test_hits_that_break_off_at_the_same_place_name_it():
    found = audits(*[(160 + 16 * n, 48) for n in range(10)])
    complaint = diagnose(found, events=True)
    assert complaint.cause is Cause.VARIABLE_FIELD
    assert "after 48 tokens" in complaint.message


def test_nothing_from_the_first_block_on_is_another_tokenizer():
    assert cause(audits(*[(64, 0)] * 10)) is Cause.TOKENIZER


def test_hits_that_are_gone_now_and_then_are_evictions():
    pairs = [(160, (0, 160, 16, 64, 0)[n % 5]) for n in range(20)]
    assert cause(audits(*pairs)) is Cause.EVICTED
