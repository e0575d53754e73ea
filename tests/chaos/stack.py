"""A whole fleet to be broken: engines, router and Envoy as processes of their own, and wires that can be cut.

    async with ChaosStack(tmp_path) as stack:
        async with stack.load() as load:
            await load.more(100)              # answers, from now on
            await stack.kill_engine(stack.engines[0])
            await load.more(100)
        await stack.expect_unharmed(load)     # see there for what that means

With `wires` there is a `KvProxy` between each engine's events and the router, with `fronts` a `MetricsFront`
before each engine, and with `log_wire` a `TcpProxy` between Envoy's access log and the router.
"""

import asyncio
import copy
import itertools
import json
import os
import random
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp

from extproc.core.sent_prefixes import LINGER_S
from tests.chaos.load import PATH, Load, Sent, documents, question
from tests.support.engine_process import EngineProcess
from tests.support.envoy import http_manager
from tests.support.full_stack import DEADLINE_S, FullStack, Worker
from tests.support.kv_proxy import KvProxy
from tests.support.metrics_front import MetricsFront
from tests.support.ports import free_port
from tests.support.tcp_proxy import TcpProxy

ENGINES = 3
ROUTER_S = 3  # how long Envoy waits for the router: for one that is paused, not for one that waits for a core
# Where the engine's own events have lied: of what is predicted, so much may be false. Blocks at the ends of
# prompts were stored more often than told, or removed: each is found out when a request misses it.
MOST_DECEIVED = 0.05
DECEIVED_S = 90.0  # and the periodic check asks for what could not be read once in 30 s
# Three questions of 5 s, then the next check in 30 s, and what is left of the machine's time.
TRUSTED_S = 90.0
CONVERGED = 50  # requests after a fault, after which belief must be right
_TICK_S = 0.5  # of the router
_ASKING = ("asking what was missed", "the engine restarted", "are missing")  # it is being asked
GROWTH = 64 << 20  # bytes of memory that one scenario may add to a router

# Answers last long enough to be in the middle of something; a third of the documents fits on an engine.
ENGINE = (
    *("--step-ms", "4", "--prefill-tokens-per-s", "200000", "--decode-ms-per-seq", "0.02"),
    *("--num-gpu-blocks", "300", "--max-model-len", "3000"),
)


class ChaosStack(FullStack):
    """See the module's docstring."""

    PROGRAM = (sys.executable, "-m", "extproc")

    def __init__(
        self,
        directory: Path,
        *,
        engine: Sequence[str] = ENGINE,
        engines: Sequence[EngineProcess] | None = None,
        wires: bool = False,
        fronts: bool = False,
        log_wire: bool = False,
        settings: dict[str, Any] | None = None,
        pool: dict[str, Any] | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.engines = list(
            engines or (EngineProcess(directory, f"engine-{n}", *engine) for n in range(1, ENGINES + 1))
        )
        self.wires = [KvProxy(e.kv_events, e.kv_replay) for e in self.engines] if wires else []
        self.fronts = [MetricsFront(e.endpoint) for e in self.engines] if fronts else []
        workers = [
            Worker(http.endpoint, kv.kv_events, kv.kv_replay)
            for http, kv in zip(self.fronts or self.engines, self.wires or self.engines, strict=True)
        ]
        admin = f"127.0.0.1:{free_port()}"
        ours = {
            "admin": {"listen": admin},
            "scrape": {"interval_s": 0.2, "timeout_s": 2.0, "stale_after_s": 3.0},
            "envoy": {"message_timeout_s": ROUTER_S},
        }
        super().__init__(
            directory,
            workers,
            settings=ours | (settings or {}),
            pool=pool,
            change_envoy=self._adapt,
            program=program,
        )
        self.state_url = f"http://{admin}/state"
        self._envoy_port = free_port()
        self.log_wire = TcpProxy(self.settings["listen"]) if log_wire else None
        self.documents = documents(random.Random(7))
        self.deaths: list[tuple[str, float, float]] = []  # endpoint, not before and not after
        self.outages: list[tuple[float, float]] = []  # of Envoy, from and until
        self._questions = itertools.count()
        self.deceived = False  # the router was told what it can never find out to be wrong
        self._processes = AsyncExitStack()
        self._memory = 0

    def _adapt(self, bootstrap: dict[str, Any]) -> None:
        """The same port after a restart, and the access log by its own wire."""
        resources = bootstrap["static_resources"]
        resources["listeners"][0]["address"]["socket_address"]["port_value"] = self._envoy_port
        if self.log_wire is None:
            return
        (router,) = (one for one in resources["clusters"] if one["name"] == "warmroute")
        wire = copy.deepcopy(router)
        wire["name"] = "access-log"
        endpoint = wire["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        endpoint["address"]["socket_address"]["port_value"] = int(self.log_wire.endpoint.rpartition(":")[2])
        wire["load_assignment"]["cluster_name"] = "access-log"
        resources["clusters"].append(wire)
        (log,) = http_manager(bootstrap)["access_log"]
        log["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = "access-log"

    async def __aenter__(self) -> Self:
        try:
            starting = [self._processes.enter_async_context(engine) for engine in self.engines]
            await asyncio.gather(*starting)
            for wire in (*self.wires, *self.fronts, *([self.log_wire] if self.log_wire else [])):
                await self._processes.enter_async_context(wire)
            await super().__aenter__()
        except BaseException:
            await self._processes.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        await self._processes.aclose()

    # --- faults --------------------------------------------------------------------------------------

    async def kill_engine(self, engine: EngineProcess) -> None:
        begin = time.monotonic()
        await engine.kill()
        self.deaths.append((self.where(engine), begin, time.monotonic()))

    def where(self, engine: EngineProcess) -> str:
        """What the router calls an engine."""
        at = self.engines.index(engine)
        return self.fronts[at].endpoint if self.fronts else engine.endpoint

    async def kill_envoy(self) -> None:
        self.outages.append((time.monotonic(), float("inf")))
        await self.envoy.child.kill()

    async def restart_envoy(self) -> None:
        await self.envoy.start()
        self.outages[-1] = (self.outages[-1][0], time.monotonic())

    def signal_router(self, number: int) -> None:
        assert self.router.pid is not None
        os.kill(self.router.pid, number)

    def signal_envoy(self, number: int) -> None:
        assert self.envoy.child.pid is not None
        os.kill(self.envoy.child.pid, number)

    def limit_files(self, largest: int) -> None:
        """No file of the router may grow beyond so many bytes: its disk is full. -1: no limit."""
        assert self.router.pid is not None
        resource.prlimit(self.router.pid, resource.RLIMIT_FSIZE, (largest, -1))

    # --- what is seen --------------------------------------------------------------------------------

    def load(self, **options: Any) -> Load:
        """Traffic while it is entered."""
        return Load(self, **options)

    async def state(self) -> dict[str, Any]:
        """The router's `/state`."""
        async with self.session.get(self.state_url) as reply:
            state: dict[str, Any] = await reply.json()
            return state

    async def states(self) -> list[dict[str, Any]]:
        """Of all routers there are."""
        return [await self.state()]

    async def until_state(self, wanted: Any, what: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait until `wanted(state)` is true of all routers; the first one's."""
        end, states = time.monotonic() + deadline_s, list[dict[str, Any]]()
        while time.monotonic() < end:
            try:
                states = await self.states()
            except aiohttp.ClientError:
                states = []  # one is starting
            if states and all(wanted(state) for state in states):
                return states[0]
            await asyncio.sleep(0.05)
        said = "\n".join(json.dumps(state)[:4000] for state in states)
        raise AssertionError(f"not in time: {what}\n{said}\n{self.router.log_tail()}")

    async def until_ready(self, workers: int = ENGINES) -> None:
        """So many workers can be used, no more."""
        await self.until_state(
            lambda state: sum(worker["ready"] for worker in state["workers"]) == workers,
            f"{workers} workers are ready",
        )

    async def until_trusted(self, deadline_s: float = TRUSTED_S) -> None:
        """The events of all workers are known to be complete.

        Meanwhile some are published, those of the others too: whom the router sends nothing says nothing.
        """
        rng, end = self._rng(), time.monotonic() + deadline_s
        while True:
            workers = [worker for state in await self.states() for worker in state["workers"]]
            unknown = {one["worker"] for one in workers if not one["cache"]["events_complete"]}
            if not unknown:
                return
            assert time.monotonic() < end, self.router.log_tail()
            asked = [self._ask_directly(where, rng) for where in sorted(unknown)]
            await asyncio.gather(*asked, *(self._ask(rng) for _ in range(2 * ENGINES)))

    async def until_routing(self) -> None:
        """The router takes part in requests (again): Envoy reconnects in its own time."""
        before = len(self.log_entries())
        rng, end = self._rng(), time.monotonic() + DEADLINE_S
        while len(self.log_entries()) == before:
            assert time.monotonic() < end, self.router.log_tail()
            await self._ask(rng)

    def router_memory(self) -> int:
        """Resident bytes."""
        pages = Path(f"/proc/{self.router.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def prompt_processes(self) -> list[int]:
        """Process ids of those that encode long prompts for the router."""
        tasks = Path(f"/proc/{self.router.pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]

    def router_files(self) -> int:
        """Open file descriptors."""
        return sum(1 for _ in Path(f"/proc/{self.router.pid}/fd").iterdir())

    # --- what is expected ----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Everything is there, warm and known: what happens from now on is the fault's doing."""
        self.deaths.clear()
        self.outages.clear()
        if self.deceived:
            await self.router.kill()
            await self.start_router()
            self.deceived = False
        await self.until_ready(len(self.engines))
        rng = self._rng()
        await asyncio.gather(*(self._ask(rng) for _ in range(2 * len(self.documents))))
        await self.until_trusted()
        self._memory = self.router_memory()

    async def expect_unharmed(self, load: Load) -> None:
        """What must hold after every fault, once it is over.

        1. No request failed that a healthy worker could have served. What a worker had begun to answer dies
           with it (headers are out: Envoy cannot take them back), and what is inside Envoy dies with Envoy.
        2. Router and Envoy are alive, and the router's memory is where it was.
        3. No lease is left.
        4. After `CONVERGED` requests nothing is predicted that is not there, and what is there is predicted.
        """
        failed = [sent for sent in load.sent if not sent.complete and not self._excused(sent)]
        assert failed == [], f"{len(failed)} of {len(load.sent)}: {failed[:5]}\n{self.router.log_tail()}"
        assert sum(sent.complete for sent in load.sent) > 0
        assert self.router.running
        assert self.envoy.child.running
        await self.expect_no_leases()
        await self.expect_no_false_credit()
        grown = self.router_memory() - self._memory
        assert grown < GROWTH, f"{grown >> 20} MiB more"

    def _excused(self, sent: Sent) -> bool:
        if any(sent.started <= until and sent.ended >= since for since, until in self.outages):
            return True
        died = {where for where, since, until in self.deaths if sent.started <= until and sent.ended >= since}
        entry = self.log_entries().get(sent.request_id)
        served_by = None if entry is None else entry.get("served_by")
        return sent.began and bool(died) and (served_by is None or served_by in died)

    async def expect_no_leases(self) -> None:
        """Nobody asks anything, and the router knows it."""
        await self.until_state(
            lambda state: (
                state["open_requests"] == 0
                and not any(worker["load"]["requests"] for worker in state["workers"])
                and not any(worker["load"]["context_tokens"] for worker in state["workers"])
            ),
            "no lease is left",
        )

    async def expect_engines_idle(self) -> None:
        """They have answered all they got."""
        await self.until_state(
            lambda state: all(worker["engine"]["running"] == 0 for worker in state["workers"]),
            "the engines are idle",
        )

    async def expect_no_false_credit(self) -> None:
        """At once where events told the truth; where they have lied, it takes until that is found out."""
        end = time.monotonic() + (DECEIVED_S if self.deceived else 0.0)
        most = MOST_DECEIVED if self.deceived else 0.0
        while True:
            claims = await self._claims()
            predicted, found = sum(claim[0] for claim in claims), sum(claim[1] for claim in claims)
            false = sum(max(0, claimed - actual) for claimed, actual, _ in claims)
            if false <= most * predicted and predicted > 0.8 * found > 0:
                return
            assert time.monotonic() < end, (claims, self.router.log_tail())

    async def _claims(self) -> list[tuple[int, int, str | None]]:
        """(predicted, cached, by whom) of some requests, `CONVERGED` after all streams were read."""
        if self.deceived:  # complete they may never be
            await self.until_state(
                lambda state: (
                    not any(
                        cause in worker["cache"]["events_cause"]
                        for worker in state["workers"]
                        for cause in _ASKING
                    )
                ),
                "no answer to a replay request is waited for",
                deadline_s=60.0,
            )
        else:
            await self.until_trusted()
        rng = self._rng()
        for _ in range(0, CONVERGED, ENGINES):
            await asyncio.gather(*(self._ask(rng) for _ in range(ENGINES)))
        # What was sent counts for so long, whether or not an event has told of it.
        await asyncio.sleep(LINGER_S + _TICK_S)
        judged = [await self._asked(rng) for _ in range(2 * len(self.documents))]
        return [(e["predicted_cached_tokens"], e["actual_cached_tokens"], e["served_by"]) for e in judged]

    def _rng(self) -> random.Random:
        """Questions that were never asked before: what is known of old ones must not help, nor mislead."""
        return random.Random(next(self._questions))

    async def _ask(self, rng: random.Random) -> str:
        reply = await self.chat(f"{rng.choice(self.documents)} Question {rng.random()}", max_tokens=1)
        assert reply.status == 200, reply
        return reply.request_id

    async def _ask_directly(self, worker: str, rng: random.Random) -> None:
        """One that the router does not know of."""
        body = question(rng.choice(self.documents), rng, stream=False, max_tokens=1)
        async with aiohttp.request("POST", f"http://{worker}{PATH}", json=body) as reply:
            assert reply.status == 200, reply

    async def _asked(self, rng: random.Random) -> dict[str, Any]:
        """The log line of one more request, asked when all before are over."""
        entry = await self.decision(await self._ask(rng))
        assert entry["outcome"] == "finished"
        return entry
