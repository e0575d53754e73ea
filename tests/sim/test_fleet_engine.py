"""The fleet engine is the engine model, told by steps that matter."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig, EngineRequest, StepResult
from extproc.sim.fleet_engine import FleetEngine
from extproc.sim.time_model import TimeModel

TIME = TimeModel(4.0, 0.25, 2.0**-12, 0.5, 2.0**-6)  # exact in binary: sums do not depend on their order


def told(results: list[StepResult]) -> list[tuple[object, ...]]:
    """What a result says, without the tokens one by one."""
    return [
        (r.at, r.events, r.first_tokens, r.finished)
        for r in results
        if r.events or r.first_tokens or r.finished
    ]


def same_future(plain: EngineModel, fleet: FleetEngine) -> bool:
    """Both idle, or the fleet engine's deadline is the model's, or ends a quiet run that begins with it."""
    mine, theirs = fleet.next_deadline(), plain.next_deadline()
    if mine is None or theirs is None:
        return mine is theirs
    return mine >= theirs


def counts(model: EngineModel) -> tuple[object, ...]:
    stats = model.stats
    return (
        replace(model.snapshot(), inter_token=None),
        pytest.approx(stats.inter_token.total),
        stats.inter_token.count,
        model.decode_blocks,
        model.outlook(),
        list(model.pool.free_queue()),
        stats.finished,
        stats.inter_token.counts,
        stats.step_tokens.counts,
        stats.generation_tokens,
        stats.preemptions,
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 4, 16]),
    blocks=st.integers(4, 40),
    sequences=st.integers(1, 6),
    budget=st.integers(7, 40),
    aborts=st.booleans(),
)
def test_every_step_that_tells_something_is_that_of_the_model(
    seed: int, block_size: int, blocks: int, sequences: int, budget: int, aborts: bool
) -> None:
    rng = random.Random(seed)
    config = EngineConfig(
        block_size=block_size,
        num_gpu_blocks=blocks + 1,
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
        max_model_len=block_size * blocks,
        time=TIME,
    )
    plain, fleet = EngineModel(config), FleetEngine(config)
    now, names = 0.0, iter(range(1000))
    ids: list[str] = []
    for _ in range(rng.randrange(3, 40)):
        now += rng.choice([0.0, 0.0, 0.001, 0.01, 0.05, 1.0])
        assert told(plain.tick(now)) == told(fleet.tick(now))
        assert same_future(plain, fleet)
        assert counts(plain) == counts(fleet)
        if aborts and ids and rng.random() < 0.3:
            gone = rng.choice(ids)
            assert plain.abort(gone) == fleet.abort(gone)
            continue
        prompt = rng.randrange(1, config.max_model_len)
        output = rng.randrange(1, config.max_model_len - prompt + 1)
        family = rng.randrange(3)
        shared = rng.randrange((prompt + output) // block_size + 1)
        name = next(names)
        hashes = tuple(
            family * 1000 + at if at < shared else 10_000 * (name + 1) + at
            for at in range((prompt + output) // block_size)
        )
        request = EngineRequest(str(name), prompt, output, hashes)
        ids.append(request.request_id)
        plain.submit(request, now)
        fleet.submit(request, now)
    while (deadline := plain.next_deadline()) is not None:
        assert same_future(plain, fleet)
        assert told(plain.tick(deadline)) == told(fleet.tick(deadline))
    assert fleet.next_deadline() is None
    assert counts(plain) == counts(fleet)


def test_the_batch_must_leave_room_for_a_prompt() -> None:
    with pytest.raises(ValueError, match="below max_num_batched_tokens"):
        FleetEngine(EngineConfig(max_num_seqs=64, max_num_batched_tokens=64))


def test_a_quiet_run_is_one_deadline_and_whoever_comes_ends_it() -> None:
    config = EngineConfig(block_size=16, num_gpu_blocks=100, max_num_seqs=4, max_model_len=1000, time=TIME)
    plain, fleet = EngineModel(config), FleetEngine(config)
    for model in (plain, fleet):
        model.submit(EngineRequest("a", 17, 100, tuple(range(7))), 0.0)
        model.tick(0.0)
    first = fleet.next_deadline()
    assert first is not None
    assert first == plain.next_deadline()
    for model in (plain, fleet):
        model.tick(first)
    run = fleet.next_deadline()
    deadlines = []
    while (deadline := plain.next_deadline()) is not None and len(deadlines) < 14:
        deadlines.append(deadline)
        plain.tick(deadline)
    assert run == deadlines[-1]
    fleet.submit(EngineRequest("b", 5, 2, ()), deadlines[3])
    assert fleet.next_deadline() == deadlines[3]
    assert fleet.stats.generation_tokens == 1 + 3


def test_ticked_only_at_its_own_deadlines_it_tells_the_same() -> None:
    config = EngineConfig(block_size=4, num_gpu_blocks=60, max_num_seqs=3, max_model_len=200, time=TIME)
    plain, fleet = EngineModel(config), FleetEngine(config)
    for at in range(6):
        request = EngineRequest(str(at), 10 + at, 30 + 7 * at, tuple(range(100 * at, 100 * at + 20)))
        plain.submit(request, 0.0)
        fleet.submit(request, 0.0)
    ticks = 0
    results: dict[EngineModel, list[StepResult]] = {plain: [], fleet: []}
    for model in (plain, fleet):
        while (deadline := model.next_deadline()) is not None:
            ticks += model is fleet
            results[model].extend(model.tick(deadline))
    assert told(results[plain]) == told(results[fleet])
    assert counts(plain) == counts(fleet)
    assert ticks < len(results[plain])
