"""Fleets whose best result is known: who gets there, and who must not."""

import pytest

from extproc.sim.measures import percentile
from extproc.sim.policies import POLICIES
from tests.support.fleet import BLOCK, ENGINE, TIME, alone, cached_share, documents, simulate, turn

EVERY = sorted(POLICIES)


def step_ms(prefill: int) -> float:
    return TIME.base_ms + TIME.prefill_ms_per_token * prefill


def ttft_ms(measures) -> list[float]:
    return [round(t * 1000, 6) for t in measures.ttft]


def test_one_worker_leaves_nothing_to_decide():
    runs = [simulate(documents(120), POLICIES[name], replicas=1) for name in EVERY]
    assert all(run.ttft == runs[0].ttft and run.e2e == runs[0].e2e for run in runs)
    assert cached_share(runs[0]) > 0.5


@pytest.mark.parametrize("name", EVERY)
def test_with_nothing_to_share_nobody_finds_anything(name):
    turns = [turn(800, 10, unique=at) for at in range(30)]
    measures = simulate(alone(turns, 1.0), POLICIES[name])
    assert cached_share(measures) == 0
    # The optimum: a request alone on its worker, one step for the whole prompt.
    assert set(ttft_ms(measures)) == {round(step_ms(800), 6)}


def test_identical_requests_at_low_load_are_computed_once_by_the_oracle():
    same = range(50)
    turns = [turn(50 * BLOCK + 5, 10, same, at) for at in range(30)]
    measures = simulate(alone(turns, 1.0), POLICIES["oracle"])
    whole = 50 * BLOCK + 5
    assert sum(measures.cached.values()) == 29 * 50 * BLOCK
    assert ttft_ms(measures) == [round(step_ms(whole), 6)] + [round(step_ms(5), 6)] * 29
    round_robin = simulate(alone(turns, 1.0), POLICIES["round-robin"])
    assert sum(round_robin.cached.values()) == 27 * 50 * BLOCK


def test_with_an_infinite_cache_and_low_load_the_oracle_computes_every_block_once():
    workload = documents(150, every_s=2.0)
    blocks = {block for session in workload.sessions for t in session.turns for block in t.blocks[:40]}
    prompts = [t.prompt_tokens for session in workload.sessions for t in session.turns]
    assert ENGINE.num_gpu_blocks > 150 * 43
    best = sum(prompts) - len(blocks) * BLOCK - sum(tokens - 40 * BLOCK for tokens in prompts)
    assert sum(simulate(workload, POLICIES["oracle"]).cached.values()) == best
    assert sum(simulate(workload, POLICIES["round-robin"]).cached.values()) < best


def test_equal_requests_at_once_spread_when_that_is_faster():
    # 3 workers, 3 requests with nothing in common: together they would take three times as long.
    turns = [turn(2000, 1, unique=at) for at in range(3)]
    measures = simulate(alone(turns, 0.0), POLICIES["oracle"])
    assert measures.sent == [1, 1, 1]
    assert set(ttft_ms(measures)) == {round(step_ms(2000), 6)}


def test_a_policy_blind_to_the_cache_finds_what_round_robin_finds():
    blind = cached_share(simulate(documents(900), POLICIES["least-load"]))
    control = cached_share(simulate(documents(900), POLICIES["round-robin"]))
    assert blind == pytest.approx(control, abs=0.02)
    seeing = cached_share(simulate(documents(900), POLICIES["token-load"]))
    assert seeing > control + 0.02


@pytest.mark.parametrize("every_s", [0.001, 0.01])
def test_no_policy_beats_the_oracle_where_caches_matter(every_s):
    def mean(name: str) -> float:
        measures = simulate(documents(300, every_s=every_s), POLICIES[name])
        return sum(measures.e2e) / len(measures.e2e)

    best = mean("oracle")
    assert all(best <= mean(name) * 1.05 for name in EVERY)
    assert best < mean("round-robin") * 0.95


def test_percentiles_are_samples():
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
