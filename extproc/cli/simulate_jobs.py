"""Runs of `warmroute simulate`: policies found by name, one job per policy and load, here or in processes."""

import importlib
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from extproc.core.errors import WarmrouteError
from extproc.sim.experiment import Load, find_knee, run_one
from extproc.sim.fleet import FleetSettings
from extproc.sim.policies import POLICIES
from extproc.sim.results import Result
from extproc.sim.routing import PolicyUnavailableError, RouterMaker
from extproc.sim.sessions import WorkloadOptions
from extproc.sim.several_routers import several
from extproc.sim.workloads import WORKLOADS

_PEERS = "loadtests.peers"

Progress = Callable[[int, int], None]
"""Told (index of the job, requests it has ended in its current run)."""


@dataclass(frozen=True, slots=True)
class Job:
    """One policy under one load; or with `knee_ttft_ms` under rising load, from `load` on.

    `routers` of them share the requests and exchange load every `exchange_ms`; 0: never.
    """

    workload: str
    options: WorkloadOptions
    policy: str
    settings: FleetSettings
    load: Load | None
    knee_ttft_ms: float | None = None
    routers: int = 1
    exchange_ms: float = 0.0

    @property
    def label(self) -> str:
        """What results call it."""
        if self.routers == 1:
            return self.policy
        told = f"{self.exchange_ms:g} ms" if self.exchange_ms else "alone"
        return f"{self.policy} x{self.routers} {told}"

    @property
    def title(self) -> str:
        """For a progress bar."""
        return self.label if self.load is None else f"{self.label} at {self.load.kind} {self.load.value:g}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: results, or why it was skipped."""

    job: Job
    results: tuple[Result, ...] = ()
    skipped: str | None = None


def peers() -> dict[str, RouterMaker]:
    """Peers by name: those of the checkout's `loadtests`, if it can be imported."""
    try:
        module = importlib.import_module(_PEERS)
    except ModuleNotFoundError as error:
        if error.name is not None and _PEERS.startswith(error.name):
            return {}
        raise
    # A folder without its __init__ is a package too, an empty one.
    found: dict[str, RouterMaker] = getattr(module, "PEERS", {})
    return found


def policy_maker(name: str) -> RouterMaker:
    """The maker of a policy.

    Args:
        name: of one of ours or of a peer, or `module:factory`.

    Raises:
        WarmrouteError: there is none of that name.
    """
    if name in POLICIES:
        return POLICIES[name]
    others = peers()
    if name in others:
        return others[name]
    module, colon, factory = name.partition(":")
    if not colon:
        raise WarmrouteError(
            f"no policy is called {name!r}; choose from {', '.join((*POLICIES, *others))}, or module:factory"
        )
    try:
        maker: RouterMaker = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise WarmrouteError(f"policy {name!r}: {error}") from None
    return maker


def run_job(job: Job, progress: Callable[[int], None] | None = None) -> Outcome:
    """Do it, in this process.

    Raises:
        WarmrouteError: the workload cannot be made.
    """
    exchange_s = job.exchange_ms / 1000.0 or None
    make = several(policy_maker(job.policy), job.routers, exchange_s)
    workload = WORKLOADS[job.workload]

    def run(load: Load | None) -> Result:
        return run_one(workload, job.options, job.label, make, job.settings, load, progress)

    try:
        if job.knee_ttft_ms is not None and job.load is not None:
            return Outcome(job, tuple(find_knee(run, job.load, job.knee_ttft_ms)))
        return Outcome(job, (run(job.load),))
    except PolicyUnavailableError as error:
        return Outcome(job, skipped=str(error))


def run_jobs(jobs: list[Job], processes: int, progress: Progress) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) of every job, as they end."""
    if processes <= 1 or len(jobs) <= 1:
        for index, job in enumerate(jobs):
            yield index, run_job(job, partial(progress, index))
        return
    context = multiprocessing.get_context("spawn")
    news: Any = context.Queue()
    pool = ProcessPoolExecutor(
        min(processes, len(jobs)), mp_context=context, initializer=_prepare, initargs=(news,)
    )
    with pool:
        pending: dict[Future[Outcome], int] = {
            pool.submit(_run_there, index, job): index for index, job in enumerate(jobs)
        }
        try:
            while pending:
                done, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                _drain(news, progress)
                for future in done:
                    yield pending.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_news: Any = None  # in a child: where progress goes


def _prepare(news: Any) -> None:
    global _news  # noqa: PLW0603 - a pool's initializer has no other way to hand something to its jobs
    _news = news


def _run_there(index: int, job: Job) -> Outcome:
    return run_job(job, lambda ended: _news.put((index, ended)))


def _drain(news: Any, progress: Progress) -> None:
    while True:
        try:
            index, ended = news.get_nowait()
        except queue.Empty:
            return
        progress(index, ended)
