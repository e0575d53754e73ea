import pytest

from extproc.core.cost import CostSettings
from extproc.core.learned import Learned
from extproc.core.leases import IDLE, WorkerLoad
from extproc.core.load_ledger import LoadLedger
from extproc.core.outcomes import Released
from extproc.core.types import Completion, Outcome
from tests.support.core import decision, request, worker


def finish(
    learned,
    *,
    load=IDLE,
    beside=0.0,
    outcome=Outcome.FINISHED,
    stream=True,
    queued=0.0,
    counted=1000,
    load_only=None,
    **fields,
):
    made = decision("a", prompt_tokens=counted, uncovered=counted)
    made.request.stream, made.request.load_only = stream, load_only
    object.__setattr__(made.candidates[0], "queued_prefill_tokens", queued)
    lease = LoadLedger().admit(made, 1, (), 0.0, 1e9)
    defaults = {
        "upstream_first_body_ms": 500.0,
        "first_body_ms": 502.0,
        "duration_ms": 502.0 + 99 * 20.0,
        "output_tokens": 100,
        "cached_tokens": 0,
    }
    learned.learn(Released(lease, Completion(outcome, **{**defaults, **fields}), 1.0), load, beside)


def first_token_ms(learned):
    fit = learned.ttft.of("default").coefficients(worker(0))
    return fit.wait_ms(0) + fit.prefill_ms(1000, 0)


def test_lengths_first_tokens_and_steps_are_learned():
    learned = Learned(CostSettings())
    for _ in range(30):
        finish(learned, load=WorkerLoad(active=1, sequences=1))
    assert learned.outputs.estimate(request(max_output=None), 1.0).expected == 100
    assert first_token_ms(learned) == pytest.approx(500.0, rel=0.05)
    assert learned.steps.of("default").coefficients.tpot_ms(1, 1000) == pytest.approx(20.0, rel=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": Outcome.CANCELLED},
        {"stream": False},
        {"status": 400, "output_tokens": None, "cached_tokens": None, "upstream_first_body_ms": 2.0},
        {"upstream_first_body_ms": None, "first_body_ms": None},
        {"served_by": worker(3).endpoint},
    ],
)
def test_what_says_nothing_about_times_teaches_none(fields):
    learned = Learned(CostSettings())
    before = first_token_ms(learned), learned.steps.of("default").coefficients
    for _ in range(30):
        finish(learned, **fields)
    assert (first_token_ms(learned), learned.steps.of("default").coefficients) == before


def test_an_error_teaches_no_length():
    learned = Learned(CostSettings())
    before = learned.outputs.estimate(request(max_output=None), 1.0)
    for _ in range(30):
        finish(learned, status=400, output_tokens=0)
    assert learned.outputs.estimate(request(max_output=None), 1.0) == before
    for _ in range(30):
        finish(learned, status=200, output_tokens=7)
    assert learned.outputs.estimate(request(max_output=None), 1.0).expected == 7


def test_what_was_estimated_by_its_size_teaches_by_what_the_engine_counts():
    """An image is a million bytes and a thousand tokens."""
    learned = Learned(CostSettings())
    for _ in range(30):
        finish(learned, load_only="unsupported:multimodal", counted=1_000_000, prompt_tokens=1000)
    assert first_token_ms(learned) == pytest.approx(500.0, rel=0.05)


def test_a_request_that_queued_teaches_no_prefill():
    learned = Learned(CostSettings())
    before = first_token_ms(learned)
    for _ in range(30):
        finish(learned, queued=5000.0)
    assert first_token_ms(learned) == before


def test_a_request_that_waited_for_memory_teaches_no_prefill():
    learned = Learned(CostSettings())
    before = first_token_ms(learned)
    learned.seen(worker(0), 3, 0.4)  # the request ran from 0 to .5 s
    for _ in range(30):
        finish(learned)
    assert first_token_ms(learned) == before
    learned.forget(worker(0))
    learned.sent(worker(0), 0, 3, 0.0)  # its engine had no place when it came
    for _ in range(30):
        finish(learned)
    assert first_token_ms(learned) == before


def test_a_request_that_came_after_others_had_waited_teaches():
    learned = Learned(CostSettings())
    learned.seen(worker(0), 3, -0.1)
    learned.seen(worker(0), 0, 0.2)
    learned.sent(worker(0), 0, 0, 0.0)
    learned.seen(worker(0), 3, 0.6)
    for _ in range(30):
        finish(learned)
    assert first_token_ms(learned) == pytest.approx(500.0, rel=0.05)


def test_others_prefill_is_not_taken_for_the_cost_of_decoding():
    alone, disturbed = Learned(CostSettings()), Learned(CostSettings())
    for _ in range(30):
        finish(alone, load=WorkerLoad(active=1, sequences=1))
        finish(
            disturbed,
            load=WorkerLoad(active=1, sequences=1),
            duration_ms=502.0 + 99 * 20.0 + 900.0,
            beside=900.0,
        )
    assert disturbed.steps.of("default").coefficients == alone.steps.of("default").coefficients
