import pytest

from extproc.sim.time_model import PRESETS, TimeModel


def test_a_step_costs_what_the_formula_says() -> None:
    model = TimeModel(
        base_ms=5,
        prefill_ms_per_token=0.5,
        attention_ms_per_pair=0.25,
        decode_ms_per_sequence=2,
        context_ms_per_token=0.125,
    )
    step_s = model.step_s(prefill_tokens=10, prefill_pairs=4, decodes=3, context_tokens=8)
    assert step_s == pytest.approx((5 + 5 + 1 + 6 + 1) / 1000)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_coefficient_that_makes_no_sense_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match="prefill_ms_per_token"):
        TimeModel(prefill_ms_per_token=bad)


def test_a_step_always_takes_time() -> None:
    with pytest.raises(ValueError, match="base_ms"):
        TimeModel(base_ms=0)


def test_in_every_preset_more_work_takes_longer() -> None:
    for model in PRESETS.values():
        assert model.step_s(1000, 0, 0, 0) > model.step_s(0, 0, 1, 10) > 0
