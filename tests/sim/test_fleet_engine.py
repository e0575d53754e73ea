"""The fleet engine is the engine model, told by steps that matter."""

import random

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


def counts(model: EngineModel) -> tuple[object, ...]:
    stats = model.stats
    return (
        model.snapshot(),
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
        assert plain.next_deadline() == fleet.next_deadline()
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
        assert fleet.next_deadline() == deadline
        assert told(plain.tick(deadline)) == told(fleet.tick(deadline))
    assert fleet.next_deadline() is None
    assert counts(plain) == counts(fleet)


def test_the_batch_must_leave_room_for_a_prompt() -> None:
    with pytest.raises(ValueError, match="below max_num_batched_tokens"):
        FleetEngine(EngineConfig(max_num_seqs=64, max_num_batched_tokens=64))
