import pytest

from extproc.sim.engine_types import EngineConfig
from extproc.sim.time_fit import FittedTime, first_token_work
from extproc.sim.time_model import TimeModel
from loadtests.fidelity.scenario import (
    DecodePoint,
    FirstTokenPoint,
    HeldOut,
    calibration,
    held_out,
    predict,
    rank_correlation,
)

CONFIG = EngineConfig(
    block_size=32, num_gpu_blocks=1024, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=16384
)
FITTED = FittedTime(TimeModel(2.0, 0.01, 1e-6, 0.1, 1e-5), request_ms=3.0, request_ms_per_token=1e-3)


@pytest.mark.parametrize("longest", [2000, 12_288])
def test_calibration_fits_the_engine_and_varies_everything(longest):
    points = calibration(longest, 32)
    assert len(points) == len(set(points))
    prompts = [point for point in points if isinstance(point, FirstTokenPoint)]
    assert max(point.prompt_tokens for point in prompts) <= longest
    assert all(point.cached_tokens % 32 == 0 for point in prompts)
    assert any(point.cached_tokens for point in prompts)
    assert {point.sequences for point in points if isinstance(point, DecodePoint)} == {1, 4, 8}


def test_held_out_requests_mix_cold_and_warm_alone_and_together():
    moments = held_out(200, 8000, seed=3)
    assert moments == held_out(200, 8000, seed=3)
    assert moments != held_out(200, 8000, seed=4)
    requests = [request for moment in moments for request in moment]
    assert len(requests) == 200
    lengths = sorted(len(request.prompt) for request in requests)
    assert lengths[0] >= 256
    assert lengths[-1] <= 8000
    assert lengths[20] * 8 < lengths[-20]
    assert {len(moment) for moment in moments} == {1, 2, 3, 4}
    assert all(list(moment) == sorted(moment, key=lambda one: one.at) for moment in moments)
    warm = sum(one.cached_tokens > 0 for one in predict(moments[:40], FITTED, CONFIG))
    assert warm > 10


def test_a_lone_request_is_predicted_by_the_formula_and_its_repetition_is_warm():
    prompt = tuple(range(300, 1300))
    moment = (HeldOut(prompt, 4, 0.0),)
    cold, warm = predict([moment, moment], FITTED, CONFIG)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 992)
    for one in (cold, warm):
        work = first_token_work(1000, one.cached_tokens, 512)
        assert one.ttft_ms == pytest.approx(FITTED.predict_ms(work))


def test_a_request_that_comes_during_a_prefill_waits_for_its_step():
    long, short = tuple(range(300, 3300)), tuple(range(40))
    alone = predict([(HeldOut(short, 1, 0.0),)], FITTED, CONFIG)[0]
    together = predict([(HeldOut(long, 1, 0.0), HeldOut(short, 1, 0.012))], FITTED, CONFIG)
    assert together[1].ttft_ms > alone.ttft_ms + 2
    assert together[0].ttft_ms > together[1].ttft_ms


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    # With ties: mean ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    with pytest.raises(ValueError, match="constant"):
        rank_correlation([1, 1], [1, 2])
    with pytest.raises(ValueError, match="two values"):
        rank_correlation([1], [1])
