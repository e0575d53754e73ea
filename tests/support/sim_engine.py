"""A simulated vLLM engine inside the test's own process, with switches for everything that can go wrong.

    async with SimEngine(num_gpu_blocks=64) as engine:
        engine.endpoint, engine.base_url        # "127.0.0.1:PORT", "http://127.0.0.1:PORT"
        engine.kv_events, engine.kv_replay      # ZMQ endpoints (None with kv_events=False)
        engine.kv_batches                       # batches published: the next one's sequence number
        engine.model                            # the EngineModel: pool, running, waiting, stats, snapshot()

        engine.faults.hang = True               # takes requests, never answers them
        engine.faults.status = 500              # answers generating requests with this status
        engine.faults.health_status = 503
        engine.faults.metrics_status = 500      # /metrics fails,
        engine.faults.metrics_frozen = True     # goes stale,
        engine.faults.metrics_hang = True       # or never answers
        engine.faults.lose_events = True        # KV events skip the wire: only a replay has them
        engine.pause(); engine.resume()         # no step ends in between: queues grow, nothing is lost
        engine.kill_connections()               # resets every client connection
        await engine.kill()                     # gone, as if the process had died
        await engine.restart()                  # back on the same ports: empty cache, sequence 0

Sizes and names are keywords; anything in `EngineConfig`, `SimEngineSettings` or `TimeModel` can be given.
Steps take almost no time unless `time=` says otherwise (`PRESETS["medium"]`, or a `TimeModel`).
"""

import dataclasses
import functools
from types import TracebackType
from typing import Any, Self

from extproc.adapters.sim_engine_requests import load_encoder
from extproc.adapters.sim_engine_server import Faults, SimEngineServer, SimEngineSettings
from extproc.prompt.tiny import tiny_model_path
from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig
from extproc.sim.time_model import PRESETS

# Loading takes longer than most tests; an encoder has no state and may be shared by threads.
_encoder = functools.cache(load_encoder)
_ENGINE_FIELDS = {field.name for field in dataclasses.fields(EngineConfig)}


class SimEngine:
    """See the module's docstring."""

    def __init__(self, **options: Any) -> None:
        engine = {name: options.pop(name) for name in _ENGINE_FIELDS & set(options)}
        engine.setdefault("time", PRESETS["instant"])
        blocks, size = engine.get("num_gpu_blocks", 4096), engine.get("block_size", 16)
        engine.setdefault("max_model_len", min(16384, (blocks - 1) * size))
        options.setdefault("model_dir", tiny_model_path())
        settings = SimEngineSettings(engine=EngineConfig(**engine), **options)
        self.server = SimEngineServer(settings, _encoder(settings.model_dir))

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.server.close()

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def base_url(self) -> str:
        return f"http://{self.endpoint}"

    @property
    def kv_events(self) -> str | None:
        return self.server.kv_events

    @property
    def kv_replay(self) -> str | None:
        return self.server.kv_replay

    @property
    def kv_batches(self) -> int:
        """KV event batches published since the engine started: the next one's sequence number."""
        return self.server.kv_batches

    @property
    def faults(self) -> Faults:
        return self.server.faults

    @property
    def model(self) -> EngineModel:
        return self.server.model

    def pause(self) -> None:
        self.server.driver.pause()

    def resume(self) -> None:
        self.server.driver.resume()

    def kill_connections(self) -> None:
        self.server.kill_connections()

    async def kill(self) -> None:
        await self.server.close()

    async def restart(self) -> None:
        await self.server.close()
        await self.server.start()
