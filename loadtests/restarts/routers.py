"""Two linked routers behind one Envoy, as `warmroute serve` and `warmroute envoy-config` make them."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from extproc import config as configuration
from extproc.adapters.child_process import ChildError, ChildProcess
from extproc.adapters.envoy_bootstrap import bootstrap
from extproc.adapters.envoy_process import EnvoyProcess
from extproc.cli.envoy_config import envoy_settings
from loadtests.live.fleet import Fleet, line_of
from loadtests.live.ports import free_ports
from loadtests.live.targets import ENVOY_THREADS, WARMROUTE, complete_workers, warmroute_config

NAMES = ("A", "B")
STOP_S = 30.0
_LINKED_S = 60.0
_LOGGED_S = 10.0
_POLL_S = 0.05


@dataclass(slots=True)
class Restart:
    """One router replaced: told to stop, gone, listening again, and following all KV events without a gap.

    Seconds of `time.perf_counter`. `complete_at` is None while it does not.
    """

    router: str
    stop_at: float
    stopped_at: float
    ready_at: float
    complete_at: float | None = None


class Routers:
    """Both of them, by `NAMES`. An async context manager; `address` is Envoy's.

    Raises (on entering):
        ChildError: something did not start.
    """

    def __init__(self, fleet: Fleet, directory: Path, message_timeout_s: float | None = None) -> None:
        self.address = ""
        self.decisions = [directory / f"decisions-{name}.jsonl" for name in NAMES]
        self._fleet = fleet
        self._directory = directory
        listen, peers, admin = free_ports(2), free_ports(2), free_ports(2)
        self._listen = [f"127.0.0.1:{port}" for port in listen]
        self._peers = [f"127.0.0.1:{port}" for port in peers]
        self._admin = [f"127.0.0.1:{port}" for port in admin]
        self._envoy: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "router": self._listen,
        }
        if message_timeout_s is not None:
            self._envoy["message_timeout_s"] = message_timeout_s
        self._lives = [0, 0]
        self._running: list[ChildProcess] = []
        self._stack = contextlib.AsyncExitStack()
        self._watching: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        try:
            for number in range(len(NAMES)):
                self._running.append(self._new(number))
                self._stack.push_async_callback(self._stop, number)
                await self._start(number)
            settings = envoy_settings(configuration.parse(json.dumps(self._config(0))))
            folder = self._directory / "envoy"
            folder.mkdir()
            envoy = EnvoyProcess(bootstrap(settings), folder, log_level="warning", concurrency=ENVOY_THREADS)
            await self._stack.enter_async_context(envoy)
            self.address = envoy.address
            for child in self._running:
                async with asyncio.timeout(_LINKED_S):
                    await line_of(child, lambda line: "load is exchanged" in line)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._watching:
            task.cancel()
        await self._stack.aclose()

    async def restart(self, number: int) -> Restart:
        """Stop one in good order and start it again; returns when it listens.

        Raises:
            ChildError: it did not end by itself, or did not start.
        """
        child, stop_at = self._running[number], time.perf_counter()
        code = await child.stop(STOP_S)
        stopped_at = time.perf_counter()
        if code != 0:
            raise ChildError(f"router {NAMES[number]} ended with {code}:\n{child.log_tail()}")
        self._running[number] = self._new(number)
        await self._start(number)
        restart = Restart(NAMES[number], stop_at, stopped_at, time.perf_counter())
        watching = asyncio.create_task(self._complete(number, restart))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        return restart

    def decided(self) -> set[str]:
        """Ids of the requests that one of them placed."""
        found = set[str]()
        for path in self.decisions:
            if path.exists():
                text = path.read_text(encoding="utf-8")
                lines = text[: text.rfind("\n") + 1].splitlines()  # the last may be being written
                found.update(json.loads(line)["request_id"] for line in lines)
        return found

    async def logged(self, ids: Collection[str]) -> None:
        """Wait until these requests have a line: Envoy tells of their ends up to a second later.

        Those that no router placed never will, so it ends after `_LOGGED_S` in any case.
        """
        give_up = time.monotonic() + _LOGGED_S
        while time.monotonic() < give_up:
            if self.decided().issuperset(ids):
                return
            await asyncio.sleep(_POLL_S)

    async def _start(self, number: int) -> None:
        await self._running[number].start()
        await line_of(self._running[number], lambda line: "listening on " in line)

    async def _stop(self, number: int) -> None:
        await self._running[number].stop()

    async def _complete(self, number: int, restart: Restart) -> None:
        child = self._running[number]
        while child.running:
            text = child.log.read_text(encoding="utf-8", errors="replace")
            if len(complete_workers(text)) == len(self._fleet.engines):
                restart.complete_at = time.perf_counter()
                return
            await asyncio.sleep(_POLL_S)

    def _new(self, number: int) -> ChildProcess:
        path = self._directory / f"router-{NAMES[number]}.yaml"
        path.write_text(yaml.safe_dump(self._config(number), sort_keys=False), encoding="utf-8")
        self._lives[number] += 1
        log = self._directory / f"router-{NAMES[number]}-{self._lives[number]}.log"
        return ChildProcess([sys.executable, "-m", "extproc", "serve", "-c", str(path)], log)

    def _config(self, number: int) -> dict[str, Any]:
        """What a user would write for two routers; everything else is default."""
        return {
            **warmroute_config(WARMROUTE, self._fleet, self.decisions[number]),
            "listen": self._listen[number],
            "admin": {"listen": self._admin[number]},
            "peers": {"listen": self._peers[number], "static": [self._peers[1 - number]]},
            "envoy": self._envoy,
        }
