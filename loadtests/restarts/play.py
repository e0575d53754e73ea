"""The load, and what is done to the routers meanwhile."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from loadtests.live.http1 import HttpError, Pool, encode
from loadtests.live.load import PATH
from loadtests.live.quality import read_stream
from loadtests.restarts.evaluate import Period, Sample
from loadtests.restarts.routers import Restart, Routers

Say = Callable[[str], None]
SCENARIOS = ("rolling", "quick", "together")
"""One after the other with a steady time between; the second as soon as the first listens; both at once."""
JUDGED = ("rolling", "quick")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long what lasts, in seconds, and how much is asked, per second."""

    rounds: int
    warm_up_s: float
    control_s: float
    steady_s: float
    rate: float
    scenarios: tuple[str, ...] = SCENARIOS


@dataclass(slots=True)
class Run:
    """One time that routers were restarted, or not (`control`)."""

    scenario: str
    round: int
    period: Period
    restarts: list[Restart] = field(default_factory=list)


class Load:
    """Requests at Poisson times, open loop, until its task is cancelled; what was sent is then awaited.

    Attributes:
        samples: what was answered.
        failures: when a request was sent, and what became of it.
        sent: request ids and when each was sent.
    """

    def __init__(self, address: str, bodies: Iterator[bytes], rate: float, seed: int) -> None:
        self.samples: list[Sample] = []
        self.failures: list[tuple[float, str]] = []
        self.sent: dict[str, float] = {}
        self._address = address
        self._bodies = bodies
        self._rate = rate
        self._rng = Random(seed)

    async def run(self, stop: asyncio.Event) -> None:
        """Send until `stop` is set."""
        due = time.perf_counter()
        async with Pool(self._address) as pool, asyncio.TaskGroup() as group:
            for number, body in enumerate(self._bodies):
                due += self._rng.expovariate(self._rate)
                await asyncio.sleep(due - time.perf_counter())
                if stop.is_set():
                    return
                group.create_task(self._one(pool, f"restart-{number}", body))

    async def _one(self, pool: Pool, request_id: str, body: bytes) -> None:
        at = self.sent[request_id] = time.perf_counter()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = await pool.request(
                    encode("POST", PATH, self._address, body, {"x-request-id": request_id})
                )
            _, prompt, cached = read_stream(answer.body)
        except (OSError, HttpError, TimeoutError, ValueError) as error:
            self.failures.append((at, f"{request_id}: {type(error).__name__}: {error}"))
            return
        if answer.status == 200:
            self.samples.append(Sample(at, prompt, cached))
        else:
            self.failures.append((at, f"{request_id}: HTTP {answer.status}"))


async def play(routers: Routers, load: Load, plan: Plan, say: Say) -> list[Run]:
    """Every scenario in every round, each round after a control of its own."""
    stop = asyncio.Event()
    sending = asyncio.create_task(load.run(stop))
    try:
        return await _rounds(routers, plan, say)
    finally:
        stop.set()
        await sending


async def _rounds(routers: Routers, plan: Plan, say: Say) -> list[Run]:
    runs = []
    say(f"filling the caches for {plan.warm_up_s:g} s")
    await asyncio.sleep(plan.warm_up_s)
    for number in range(plan.rounds):
        for scenario in ("control", *plan.scenarios):
            say(f"round {number + 1} of {plan.rounds}: {scenario}")
            begin = time.perf_counter()
            restarts = await _scenario(scenario, routers, plan)
            runs.append(Run(scenario, number, Period(begin, time.perf_counter()), restarts))
    return runs


async def _scenario(scenario: str, routers: Routers, plan: Plan) -> list[Restart]:
    restarts = []
    match scenario:
        case "control":
            await asyncio.sleep(plan.control_s)
            return []
        case "rolling":
            restarts = [await routers.restart(0)]
            await asyncio.sleep(plan.steady_s)
            restarts.append(await routers.restart(1))
        case "quick":
            restarts = [await routers.restart(0), await routers.restart(1)]
        case _:
            restarts = list(await asyncio.gather(routers.restart(0), routers.restart(1)))
    await asyncio.sleep(plan.steady_s)
    return restarts
