"""A fleet with two routers that tell each other what they do, over wires that can be cut.

`routers` are their processes, and `peer_wires` the way to each of them: a router hears the other over the
other's wire.
"""

import asyncio
import resource
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from extproc.adapters.child_process import ChildProcess
from tests.chaos.stack import ROUTER_S, ChaosStack
from tests.support.decision_lines import DecisionLines
from tests.support.full_stack import START_S
from tests.support.ports import free_ports
from tests.support.tcp_proxy import TcpProxy

BOTH = (0, 1)
EXCHANGED, ALONE = "load is exchanged", "we go on alone"


class PairStack(ChaosStack):
    """See the module's docstring."""

    def __init__(self, directory: Path) -> None:
        ports, self._peers, admins = free_ports(2), free_ports(2), free_ports(2)
        self._listen = [f"127.0.0.1:{port}" for port in ports]
        self._admin = [f"127.0.0.1:{port}" for port in admins]
        self.peer_wires = [TcpProxy(f"127.0.0.1:{port}") for port in self._peers]
        self.routers = [
            ChildProcess(self._command(directory, number), directory / f"router-{number}.log")
            for number in BOTH
        ]
        self._logs = [DecisionLines(directory / f"decisions-{number}.jsonl") for number in BOTH]
        super().__init__(
            directory, settings={"envoy": {"message_timeout_s": ROUTER_S, "router": self._listen}}
        )

    @staticmethod
    def _command(directory: Path, number: int) -> list[str]:
        return [*ChaosStack.PROGRAM, "serve", "-c", str(directory / f"router-{number}.yaml")]

    async def __aenter__(self) -> Self:
        for wire in self.peer_wires:
            await self._processes.enter_async_context(wire)
        await super().__aenter__()
        return self

    async def start_router(self) -> None:
        """Both."""
        await asyncio.gather(*(self.start_one(number) for number in BOTH))
        self.router = self.routers[0]

    async def stop_router(self) -> None:
        await asyncio.gather(*(router.stop() for router in self.routers))

    async def start_one(self, number: int) -> None:
        """Start one of them (again) and wait until it listens."""
        peers = {
            "listen": f"127.0.0.1:{self._peers[number]}",
            "static": [self.peer_wires[1 - number].endpoint],
            "fade_after_s": 0.5,
            "gone_after_s": 1.5,
        }
        settings = self.settings | {
            "listen": self._listen[number],
            "admin": {"listen": self._admin[number]},
            "decision_log": {"path": str(self._logs[number].path)},
            "peers": peers,
        }
        (self.directory / f"router-{number}.yaml").write_text(yaml.safe_dump(settings))
        router, begun = self.routers[number], self.said(number, "listening on")
        await router.start()
        await self.until(lambda: self.said(number, "listening on") > begun or not router.running, START_S)
        assert router.running, router.log_tail()

    def said(self, number: int, text: str) -> int:
        """How often a router has said so."""
        log = self.routers[number].log
        return log.read_text().count(text) if log.exists() else 0

    async def until_said(self, text: str, before: tuple[int, ...]) -> None:
        """Both routers say it once more than `before`."""
        await self.until(lambda: all(self.said(number, text) > before[number] for number in BOTH))

    def counts(self, text: str) -> tuple[int, ...]:
        """How often each router has said so."""
        return tuple(self.said(number, text) for number in BOTH)

    def log_entries(self) -> dict[str, dict[str, Any]]:
        """Of both; `router` says whose."""
        return {
            one: entry | {"router": number}
            for number in BOTH
            for one, entry in self._logs[number].entries().items()
        }

    async def states(self) -> list[dict[str, Any]]:
        """`/state` of both."""
        found = []
        for admin in self._admin:
            async with aiohttp.request("GET", f"http://{admin}/state") as reply:
                found.append(await reply.json())
        return found

    def router_memory(self) -> int:
        """Resident bytes of both."""
        pages = sum(int(Path(f"/proc/{one.pid}/statm").read_text().split()[1]) for one in self.routers)
        return pages * resource.getpagesize()

    async def begin(self) -> None:
        await super().begin()
        await self.until_peers_are_heard()

    async def until_peers_are_heard(self) -> None:
        """Each counts what the other tells, in full."""

        def heard(state: dict[str, Any]) -> bool:
            return all(peer["connected"] and peer["weight"] == 1.0 for peer in state["peers"]["peers"])

        await self.until_state(heard, "peers hear each other")
