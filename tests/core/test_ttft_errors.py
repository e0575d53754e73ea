from dataclasses import replace

import pytest

from extproc.core.load_ledger import LoadLedger
from extproc.core.outcomes import Released
from extproc.core.ttft_errors import WINDOW, ErrorBook, relative_error, summarize
from extproc.core.types import Completion, Outcome
from tests.support.core import decision, worker


def released(predicted, actual, *, stream=True, **fields):
    made = decision(prefill_ms=predicted)
    made = replace(made, request=replace(made.request, stream=stream))
    lease = LoadLedger().admit(made, 1, (), 0.0, 9.0)
    given = {"outcome": Outcome.FINISHED, "upstream_first_body_ms": actual, **fields}
    return Released(lease, Completion(**given), 1.0)


def test_an_error_is_a_share_of_the_actual_time():
    assert relative_error(released(120.0, 100.0)) == pytest.approx(0.2)
    assert relative_error(released(50.0, 100.0)) == pytest.approx(-0.5)


def test_what_cannot_be_compared_is_no_error():
    assert relative_error(released(120.0, None)) is None
    assert relative_error(released(120.0, 100.0, stream=False)) is None
    assert relative_error(released(120.0, 100.0, outcome=Outcome.CANCELLED)) is None
    assert relative_error(released(120.0, 100.0, status=400)) is None
    assert relative_error(released(120.0, 100.0, served_by="elsewhere:1")) is None
    assert relative_error(released(120.0, 100.0, served_by=worker().endpoint)) is not None


def test_bias_is_signed_and_quantiles_are_not():
    errors = summarize([-0.4, -0.2, -0.1, 0.05, 0.3])
    assert (errors.requests, errors.bias, errors.median, errors.p90) == (5, -0.1, 0.2, 0.4)
    assert summarize([]) == (0, None, None, None)


def test_pools_are_apart_and_old_errors_are_forgotten():
    book = ErrorBook()
    for _ in range(WINDOW):
        book.observe(released(200.0, 100.0))
    assert book.of("default").median == pytest.approx(1.0)
    for _ in range(WINDOW):
        book.observe(released(110.0, 100.0))
    assert book.of("default") == pytest.approx((WINDOW, 0.1, 0.1, 0.1))
    assert book.of("other").requests == 0
