from array import array

import pytest

from extproc.sim.engine_types import EngineConfig, EngineRequest


def test_a_pool_too_small_for_one_sequence_is_refused_with_what_to_do() -> None:
    EngineConfig(block_size=16, num_gpu_blocks=5, max_model_len=64)
    with pytest.raises(ValueError, match="raise num_gpu_blocks or lower max_model_len"):
        EngineConfig(block_size=16, num_gpu_blocks=4, max_model_len=64)


def test_salt_adapter_and_engine_keep_chains_apart() -> None:
    tokens = array("I", range(64))
    config, other = EngineConfig(), EngineConfig(seed=1)

    def hashes(config: EngineConfig, **namespace: str) -> tuple[int, ...]:
        return tuple(
            EngineRequest.from_tokens("r", tokens, array("I", [1]), config, **namespace).block_hashes
        )

    chains = [
        hashes(config),
        hashes(config, cache_salt="a"),
        hashes(config, cache_salt="b"),
        hashes(config, adapter="a"),
        hashes(other),
    ]
    assert len({block for chain in chains for block in chain}) == 5 * 4
    assert hashes(config) == chains[0]


def test_blocks_cover_prompt_and_output_together() -> None:
    config = EngineConfig(block_size=8)
    request = EngineRequest.from_tokens("r", array("I", range(5)), array("I", range(12)), config)
    assert (request.prompt_tokens, request.output_tokens, len(request.block_hashes)) == (5, 12, 2)
