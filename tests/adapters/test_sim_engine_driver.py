import asyncio
from array import array
from collections.abc import Sequence

import pytest

from extproc.adapters.sim_engine_driver import EngineDriver
from extproc.core.types import KvEvent
from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig, EngineRequest, RequestTooLongError
from extproc.sim.time_model import TimeModel
from tests.support.waiting import until

CONFIG = EngineConfig(
    block_size=4, num_gpu_blocks=64, max_model_len=100, time=TimeModel(5.0, 0.0, 0.0, 0.0, 0.0)
)


def request(name: str, prompt: int = 9, output: int = 3) -> EngineRequest:
    return EngineRequest.from_tokens(name, array("I", range(prompt)), array("I", range(output)), CONFIG)


async def test_events_come_before_the_tokens_of_their_step() -> None:
    seen: list[int] = []
    changed = asyncio.Event()
    generations = []

    def publish(events: Sequence[KvEvent]) -> None:
        assert events
        seen.append(generations[0].emitted)

    driver = EngineDriver(EngineModel(CONFIG), publish)
    generations += driver.submit([request("a", output=4)], changed)
    await until(lambda: generations[0].finished)
    # The prompt's blocks are told before the first token, the block that the output fills before its token.
    assert seen == [0, 3]
    assert (generations[0].emitted, generations[0].cached_tokens) == (4, 0)
    driver.close()


async def test_wall_time_follows_model_time_without_drift() -> None:
    driver = EngineDriver(EngineModel(CONFIG), lambda events: None)
    loop = asyncio.get_running_loop()
    started = loop.time()
    (generation,) = driver.submit([request("a", output=40)], asyncio.Event())
    await until(lambda: generation.finished)
    # 40 steps of 5 ms: never early, and the model itself took exactly that long.
    assert loop.time() - started >= 0.2 - 0.001
    assert driver.model.stats.e2e.total == pytest.approx(0.2)
    driver.close()


async def test_a_request_is_taken_whole_or_not_at_all() -> None:
    driver = EngineDriver(EngineModel(CONFIG), lambda events: None)
    with pytest.raises(RequestTooLongError):
        driver.submit([request("a"), request("b", prompt=100)], asyncio.Event())
    assert driver.model.waiting == 0
    driver.close()


async def test_nothing_moves_while_paused_and_the_pause_does_not_count() -> None:
    driver = EngineDriver(EngineModel(CONFIG), lambda events: None)
    driver.pause()
    driver.pause()
    (generation,) = driver.submit([request("a")], asyncio.Event())
    await asyncio.sleep(0.05)
    assert generation.emitted == 0
    driver.resume()
    await until(lambda: generation.finished)
    assert driver.model.stats.e2e.total == pytest.approx(0.015)
    driver.close()


async def test_aborting_a_finished_request_changes_nothing() -> None:
    driver = EngineDriver(EngineModel(CONFIG), lambda events: None)
    generations = driver.submit([request("a"), request("b", output=50)], asyncio.Event())
    await until(lambda: generations[0].finished)
    driver.abort(generations)
    driver.abort(generations)
    assert driver.model.stats.finished == {"stop": 0, "length": 1, "abort": 1}
    assert driver.model.pool.usage == 0.0
    driver.close()
