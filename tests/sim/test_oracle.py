from zlib import crc32

import pytest

from extproc.sim.engine_types import EngineRequest
from extproc.sim.fleet_engine import FleetEngine
from extproc.sim.oracle import Oracle
from extproc.sim.routing import FleetFacts, SeesEngines, SimRequest
from tests.support.fleet import BLOCK, ENGINE, turn


def fleet(replicas=2):
    oracle = Oracle(FleetFacts(replicas, ENGINE), 0)
    engines = [FleetEngine(ENGINE) for _ in range(replicas)]
    assert isinstance(oracle, SeesEngines)
    oracle.attach(engines, 0.01)
    return oracle, engines


def ask(name, prompt=50 * BLOCK, output=10, shared=()):
    truth = turn(prompt, output, shared, crc32(name.encode()) % 10_000)
    return SimRequest(
        name, name, "", "", 0, prompt, BLOCK, tuple(truth.blocks[: (prompt - 1) // BLOCK]), None, truth
    )


def give(oracle, worker, request, now=0.0):
    """As if it had been routed to `worker`, and has arrived."""
    engine, truth = oracle._engines[worker], request.truth
    oracle._todo[request.request_id] = request.prompt_tokens
    engine.submit(
        EngineRequest(request.request_id, request.prompt_tokens, truth.output_tokens, truth.blocks), now
    )


def run(engine, until):
    while (deadline := engine.next_deadline()) is not None and deadline <= until:
        engine.tick(deadline)


def test_it_goes_where_the_blocks_are():
    oracle, engines = fleet(3)
    give(oracle, 1, ask("before", shared=range(45)))
    run(engines[1], 100.0)
    assert oracle.route(ask("a", shared=range(45)), 100.0) == 1


def test_it_leaves_warmth_for_an_idle_worker_when_the_queue_costs_more():
    oracle, engines = fleet()
    give(oracle, 1, ask("before", shared=range(45)))
    run(engines[1], 100.0)
    for at in range(4):
        give(oracle, 1, ask(f"long{at}", prompt=16_000), 100.0)
    assert oracle.route(ask("a", shared=range(45)), 100.0) == 0


def test_requests_on_the_wire_are_there_already():
    oracle, _ = fleet(3)
    assert sorted(oracle.route(ask(f"r{at}"), 0.0) for at in range(3)) == [0, 1, 2]


def test_what_is_about_to_be_cached_counts():
    oracle, _ = fleet(2)
    first = oracle.route(ask("a", prompt=8000, shared=range(499)), 0.0)
    assert oracle.route(ask("b", prompt=8000, shared=range(499)), 0.0) == first


def test_it_knows_how_much_is_left_to_generate():
    oracle, engines = fleet()
    for at in range(8):
        give(oracle, 0, ask(f"short{at}", prompt=64, output=3))
        give(oracle, 1, ask(f"long{at}", prompt=64, output=3000))
    for engine in engines:
        engine.tick(0.0)
    assert oracle.route(ask("a", output=500), 0.0) == 0


def test_memory_that_is_full_costs():
    small = FleetFacts(2, ENGINE)
    oracle, engines = fleet()
    give(oracle, 0, ask("big", prompt=19_000, output=900))
    run(engines[0], 6.0)
    assert small.engine.num_gpu_blocks > 19_900 // BLOCK
    assert oracle.route(ask("a"), 6.0) == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_ties_are_broken_by_chance(seed):
    chosen = {Oracle(FleetFacts(4, ENGINE), s) for s in range(8)}
    workers = set()
    for oracle in chosen:
        oracle.attach([FleetEngine(ENGINE) for _ in range(4)], 0.0)
        workers.add(oracle.route(ask(f"x{seed}"), 0.0))
    assert len(workers) > 1
