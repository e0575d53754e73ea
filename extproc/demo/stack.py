"""Engines, router and Envoy as child processes on free loopback ports. Nothing outlives the demo."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import yaml

from extproc.adapters.assembled import Assembled
from extproc.adapters.child_process import ChildError, ChildProcess
from extproc.adapters.envoy_bootstrap import EnvoySettings, StaticWorkers, bootstrap
from extproc.adapters.envoy_process import EnvoyProcess
from extproc.demo import vllm_command
from extproc.prompt.tiny import tiny_model_path

_POLL_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What to run. Sizes: tokens per block, blocks per engine."""

    policy: str
    engines: int = 3
    vllm_python: str | None = None  # None: simulated engines
    block_size: int = 16
    engine_blocks: int = 900
    prefill_tokens_per_s: float = 12_000.0
    start_deadline_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Engine:
    """One running engine and how to reach it."""

    child: ChildProcess
    endpoint: str
    kv_events: str
    kv_replay: str


class Stack(Assembled):
    """A complete installation with one policy. An async context manager.

    Args:
        settings: what to run.
        directory: an existing empty folder for configuration and logs.
        on_stage: told what is being started.

    Raises (on entering):
        ChildError: something did not start; the message has the end of its log.
    """

    def __init__(
        self, settings: StackSettings, directory: Path, on_stage: Callable[[str], None] = lambda _: None
    ) -> None:
        super().__init__()
        self._settings = settings
        self._directory = directory
        self._on_stage = on_stage
        self.decisions = directory / "decisions.jsonl"
        self.model = "tiny"
        self.url = ""
        self.status_page = ""

    async def _start(self) -> None:
        settings = self._settings
        kind = "real vLLM" if settings.vllm_python else "simulated"
        self._on_stage(f"starting {settings.engines} {kind} engines")
        engines = await self._engines()
        self._on_stage(f"starting the router with policy {settings.policy}")
        router = await self._router(engines)
        self._on_stage("starting Envoy")
        envoy = EnvoyProcess(
            bootstrap(
                EnvoySettings(
                    workers=StaticWorkers(tuple(engine.endpoint for engine in engines)),
                    routers=(router,),
                    listen_address="127.0.0.1",
                    listen_port=0,
                    admin_port=0,
                )
            ),
            self._directory,
        )
        await self._cleanup.enter_async_context(envoy)
        self.url = envoy.url

    async def _engines(self) -> list[Engine]:
        """All of them at once; when one does not start, none is left starting."""
        try:
            async with asyncio.TaskGroup() as group:
                starting = [group.create_task(self._engine(n)) for n in range(self._settings.engines)]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in starting]

    async def _engine(self, number: int) -> Engine:
        settings = self._settings
        log = self._directory / f"engine-{number}.log"
        environment = dict(os.environ)
        if settings.vllm_python is None:
            command = [
                *(sys.executable, "-m", "extproc", "engine", "--port", "0"),
                *("--block-size", str(settings.block_size), "--num-gpu-blocks", str(settings.engine_blocks)),
                *("--prefill-tokens-per-s", str(settings.prefill_tokens_per_s)),
            ]
        else:
            command, environment = vllm_command.build(
                settings.vllm_python, self._directory / f"engine-{number}", settings.engine_blocks
            )
        child = ChildProcess(command, log, env=environment)
        await self._cleanup.enter_async_context(child)
        if settings.vllm_python is None:
            ready = json.loads(await self._line(child, lambda line: line.startswith("{")))
            return Engine(child, f"127.0.0.1:{ready['port']}", ready["kv_events"], ready["kv_replay"])
        endpoint, events, replay = vllm_command.endpoints(command)
        await self._healthy(child, endpoint)
        return Engine(child, endpoint, events, replay)

    async def _router(self, engines: list[Engine]) -> str:
        config = self.router_config(engines)
        path = self._directory / "warmroute.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        child = ChildProcess(
            [sys.executable, "-m", "extproc", "serve", "-c", str(path)], self._directory / "router.log"
        )
        await self._cleanup.enter_async_context(child)
        line = await self._line(child, lambda text: "listening on " in text)
        page = await self._line(child, lambda text: "status page: " in text)
        self.status_page = page.rsplit("status page: ", 1)[1].strip()
        return line.rsplit("listening on ", 1)[1].strip()

    def router_config(self, engines: list[Engine]) -> dict[str, Any]:
        """The configuration the router runs with: what a user would write for this fleet."""
        return {
            "listen": "127.0.0.1:0",
            "policy": self._settings.policy,
            "seed": 1,
            "decision_log": {"path": str(self.decisions)},
            "admin": {"listen": "127.0.0.1:0"},
            "pools": [
                {
                    "name": "default",
                    "model": {"path": str(tiny_model_path()), "names": [self.model]},
                    "discovery": {
                        "static": [
                            {
                                "endpoint": engine.endpoint,
                                "kv_events": engine.kv_events,
                                "kv_replay": engine.kv_replay,
                            }
                            for engine in engines
                        ]
                    },
                }
            ],
        }

    async def _line(self, child: ChildProcess, wanted: Callable[[str], bool]) -> str:
        """The first line of a child's output that is `wanted`."""

        async def look() -> str:
            while True:
                text = child.log.read_text(encoding="utf-8", errors="replace") if child.log.exists() else ""
                complete = text[: text.rfind("\n") + 1]
                line = next((line for line in complete.splitlines() if wanted(line)), None)
                if line is not None:
                    return line
                if not child.running:
                    raise ChildError(f"{' '.join(child.command[:4])} ended:\n{child.log_tail()}")
                await asyncio.sleep(_POLL_S)

        return await self._in_time(child, look())

    async def _healthy(self, child: ChildProcess, endpoint: str) -> None:
        async def look() -> None:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
                while True:
                    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(f"http://{endpoint}/health") as reply:
                            if reply.status == 200:
                                return
                    if not child.running:
                        raise ChildError(f"the engine ended:\n{child.log_tail()}")
                    await asyncio.sleep(_POLL_S)

        await self._in_time(child, look())

    async def _in_time(self, child: ChildProcess, waiting: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(waiting, self._settings.start_deadline_s)
        except TimeoutError:
            raise ChildError(
                f"{' '.join(child.command[:4])} was not ready in {self._settings.start_deadline_s:.0f} s:\n"
                f"{child.log_tail()}"
            ) from None


def audit(decisions: Path) -> tuple[int, int]:
    """(exact, total): requests whose predicted cached tokens equal the engine's, of those that have both."""
    exact = total = 0
    for line in decisions.read_text(encoding="utf-8").splitlines() if decisions.exists() else ():
        entry = json.loads(line)
        predicted, actual = entry["predicted_cached_tokens"], entry["actual_cached_tokens"]
        if predicted is not None and actual is not None:
            total += 1
            exact += predicted == actual
    return exact, total
