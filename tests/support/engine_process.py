"""A simulated vLLM engine as a process of its own (`warmroute engine`), to be killed, paused and restarted.

async with EngineProcess(tmp_path, "engine-1", "--num-gpu-blocks", "200") as engine:
    engine.endpoint, engine.kv_events, engine.kv_replay
    await engine.kill(); await engine.start()    # the same ports, an empty cache, sequence 0
    engine.pause(); engine.resume()              # SIGSTOP, SIGCONT
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from extproc.adapters.child_process import ChildProcess
from tests.support.ports import free_ports
from tests.support.waiting import until

_START_S = 60.0


class EngineProcess:
    """See the module's docstring. `options` are those of `warmroute engine`."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *options: str,
        host: str = "127.0.0.1",
        ports: tuple[int, int, int] | None = None,
    ) -> None:
        self.name = name
        self._directory = directory
        self._starts = 0
        port, events, replay = ports or free_ports(3)
        self.endpoint = f"{host}:{port}"
        self.base_url = f"http://{self.endpoint}"
        self.kv_events = f"tcp://{host}:{events}"
        self.kv_replay = f"tcp://{host}:{replay}"
        self._command = [
            *(sys.executable, "-m", "extproc", "engine", "--host", host, "--port", str(port)),
            *("--kv-events-port", str(events), "--kv-replay-port", str(replay)),
            *options,
        ]
        self.child: ChildProcess

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.resume()
        await self.child.stop(grace=1.0)

    @property
    def running(self) -> bool:
        return self.child.running

    async def start(self) -> None:
        """Start it, again if it was killed, and wait until it answers."""
        self._starts += 1
        log = self._directory / f"{self.name}-{self._starts}.log"
        self.child = ChildProcess(self._command, log)
        await self.child.start()

        def ready() -> Any:
            assert self.child.running, self.child.log_tail()
            return any(_is_ready(line) for line in self.child.log_tail().splitlines())

        await until(ready, _START_S, f"{self.name} is ready")

    async def kill(self) -> None:
        await self.child.kill()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.child.pid is not None
        os.kill(self.child.pid, number)


def _is_ready(line: str) -> bool:
    try:
        return bool(json.loads(line)["ready"])
    except (ValueError, TypeError, KeyError):
        return False
