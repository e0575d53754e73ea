"""The engine model's times against a real vLLM's, on requests the fit has not seen.

Times are not asserted lightly: everything is measured several times, alternately, and only medians count; and
a machine that was busy with something else gets two more chances.
"""

import asyncio

import pytest

from extproc.sim.engine_types import EngineConfig
from loadtests.fidelity.measure import Report, measure
from tests.support.vllm import ReplicaSpec, VllmPool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

STEP_TOKENS = 2048
BLOCKS = 1024
ATTEMPTS = 3


def test_fitted_times_rank_and_size_what_was_held_out(vllm_pool: VllmPool) -> None:
    (replica,) = vllm_pool.start(
        ReplicaSpec(num_gpu_blocks_override=BLOCKS, extra_args=("--max-num-batched-tokens", str(STEP_TOKENS)))
    )
    config = EngineConfig(
        block_size=replica.spec.block_size,
        num_gpu_blocks=BLOCKS,
        max_num_seqs=replica.spec.max_num_seqs,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=replica.spec.max_model_len,
    )
    try:
        reports: list[Report] = []
        for attempt in range(ATTEMPTS):
            report = asyncio.run(measure(replica.endpoint, config, seed=attempt))
            reports.append(report)
            if report.rank_correlation >= 0.95 and report.median_error <= 0.20:
                break
    finally:
        replica.kill()

    summary = [(round(one.rank_correlation, 3), round(one.median_error, 3)) for one in reports]
    assert reports[-1].rank_correlation >= 0.95, summary
    assert reports[-1].median_error <= 0.20, summary
    assert sum(one.cached_tokens > 0 for one in report.compared) > 10, "nothing was warm"
    assert sum(one.together > 1 for one in report.compared) > 10, "nothing ran at once"
    alone = [one for one in report.compared if one.together == 1]
    assert [one for one in alone if one.cached_tokens != one.predicted_cached_tokens] == []
