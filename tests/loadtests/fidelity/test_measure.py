import dataclasses

import pytest

from extproc.sim.engine_types import EngineConfig
from extproc.sim.time_model import TimeModel
from loadtests.fidelity.__main__ import document, engine_options
from loadtests.fidelity.measure import Compared, MeasurementError, Report, measure
from tests.support.sim_engine import SimEngine

CONFIG = EngineConfig(
    block_size=32,
    num_gpu_blocks=256,
    max_num_seqs=16,
    max_num_batched_tokens=1024,
    max_model_len=4096,
    time=TimeModel(1.0, 0.001, 0.0, 0.01, 0.0),
)
FIELDS = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(EngineConfig)}


async def test_every_request_is_measured_and_its_cached_tokens_are_foreseen():
    rounds = []
    async with SimEngine(**FIELDS) as engine:
        report = await measure(engine.endpoint, CONFIG, requests=12, rounds=2, on_round=rounds.append)
        assert engine.model.running == engine.model.waiting == 0
    assert rounds == [0, 1]
    assert len(report.compared) == 12
    alone = [one for one in report.compared if one.together == 1]
    assert all(one.cached_tokens == one.predicted_cached_tokens for one in alone)
    assert any(one.cached_tokens for one in report.compared)
    made = document(report)
    assert made["held_out"]["requests"] == len(made["requests"]) == 12
    assert made["fitted"]["time"]["base_ms"] > 0


async def test_an_engine_that_cannot_be_measured_is_an_error():
    async with SimEngine(**FIELDS) as engine:
        with pytest.raises(MeasurementError, match="at least 10"):
            await measure(engine.endpoint, CONFIG, requests=5)
        engine.faults.status = 500
        with pytest.raises(MeasurementError, match="answered 500"):
            await measure(engine.endpoint, CONFIG, requests=10, rounds=1)


def test_errors_are_relative_to_what_was_measured():
    compared = tuple(
        Compared(100, 1, 0, 0, real, predicted) for real, predicted in ((10, 11), (20, 18), (40, 60))
    )
    report = Report(None, compared, 0.0)
    assert [one.error for one in compared] == pytest.approx([0.1, -0.1, 0.5])
    assert report.median_error == pytest.approx(0.1)
    assert report.rank_correlation == pytest.approx(1)


def test_engine_options_are_those_of_the_command():
    line = engine_options(TimeModel(1.5, 0.004, 2e-6, 0.25, 1e-5))
    assert line == [
        *("--step-ms", "1.5", "--prefill-tokens-per-s", "250000", "--attention-ms-per-pair", "2e-06"),
        *("--decode-ms-per-seq", "0.25", "--context-ms-per-token", "1e-05"),
    ]
