import pytest

from loadtests.live import bench
from loadtests.live.fleet import Engine, Fleet
from loadtests.live.peers import RUST_ROUTERS
from loadtests.live.quality import QUICK
from loadtests.live.schedule import LOADS
from loadtests.live.targets import DIRECT, Target
from tests.support.sim_engine import SimEngine

TWIN = Target("twin", "direct")
ABSENT = Target("smg cache_aware", "rust", "cache_aware", RUST_ROUTERS[2])


@pytest.fixture
async def fleet():
    async with SimEngine(num_gpu_blocks=8192) as engine:
        made = Engine(engine.endpoint, engine.kv_events, engine.kv_replay, "warmroute engine")
        yield Fleet("simulated", (made,), 16)


async def test_every_run_of_every_target_meets_empty_engines(fleet, tmp_path):
    told = []
    runs, outcome = await bench.quality(
        fleet, [DIRECT, ABSENT, TWIN], QUICK, ("documents",), 2, tmp_path, None, told.append
    )
    assert list(runs) == [("documents", "direct"), ("documents", "twin")]
    shares = {key[1]: [run.cached_share for run in found] for key, found in runs.items()}
    # Another's documents in the cache would make almost everything a hit.
    assert all(0.5 < share < 0.85 for found in shares.values() for share in found)
    # The same texts for all in a repetition, other texts in the next.
    tokens = {key[1]: [run.prompt_tokens for run in found] for key, found in runs.items()}
    assert tokens["direct"] == tokens["twin"]
    assert tokens["direct"][0] != tokens["direct"][1]
    assert not any(run.failures for found in runs.values() for run in found)
    assert len(outcome.skipped) == 1
    assert "pip install" in outcome.skipped[0]
    assert any("repetition 2" in text and "twin" in text for text in told)


async def test_overhead_gives_every_target_a_slice_of_every_load_in_every_round(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "find_wrk", lambda: None)
    plan = bench.OverheadPlan(
        rounds=2, open_s=0.1, closed_s=0.05, rates={"2 KB": 50.0, "128 KB": 20.0}, concurrency=2, templates=2
    )
    told = []
    monkeypatch.setattr(bench, "LOADS", LOADS[:2])
    slices, outcome = await bench.overhead(fleet, [DIRECT, ABSENT, TWIN], plan, tmp_path, None, told.append)
    assert set(slices) == {(load.name, name) for load in LOADS[:2] for name in ("direct", "twin")}
    assert all(len(found) == 2 for found in slices.values())
    assert outcome.commands == {"direct": "(no proxy)", "twin": "(no proxy)"}
    for found in slices.values():
        for one in found:
            assert one.throughput.per_second > 0
            assert one.throughput.failed == 0
    # Both met the same schedule.
    counts = {
        name: [one.latency.requests for one in slices[LOADS[0].name, name]] for name in ("direct", "twin")
    }
    assert counts["direct"] == counts["twin"]
    order = [text.rsplit(": ")[-1] for text in told if text.startswith("round") and LOADS[0].name in text]
    assert order == ["direct", "twin", "twin", "direct"]
