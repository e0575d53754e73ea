import pytest

from extproc.sim.hardware import A100, ENGINE_PRESETS, H100, LLAMA_8B, LLAMA_70B, Gpu, roofline


@pytest.mark.parametrize("name", sorted(ENGINE_PRESETS))
@pytest.mark.parametrize("block_size", [16, 512])
def test_every_preset_makes_an_engine(name, block_size):
    preset = ENGINE_PRESETS[name]
    engine = preset.engine(block_size)
    assert engine.time is preset.time
    assert preset.kv_tokens - block_size < (engine.num_gpu_blocks - 1) * block_size <= preset.kv_tokens
    assert preset.source


def test_the_published_decode_measurement_is_met_within_a_tenth():
    # Llama 3.1 8B on an A100 40 GB: 75 tokens/s for one request.
    assert roofline(LLAMA_8B, Gpu(312.0, 1555.0, 40.0)).time.base_ms == pytest.approx(1000 / 75, rel=0.1)


def test_a_faster_gpu_is_faster_and_a_larger_model_slower():
    slow, fast = roofline(LLAMA_8B, A100).time, roofline(LLAMA_8B, H100).time
    large = roofline(LLAMA_70B, H100, 4).time
    assert fast.base_ms < slow.base_ms
    assert fast.prefill_ms_per_token < slow.prefill_ms_per_token < 1
    assert large.base_ms > fast.base_ms


def test_splitting_a_model_gains_less_than_the_number_of_gpus():
    one, four = roofline(LLAMA_8B, H100).time, roofline(LLAMA_8B, H100, 4).time
    assert one.prefill_ms_per_token / 4 < four.prefill_ms_per_token < one.prefill_ms_per_token
