"""The cases of the comparison: a workload, the load it is asked under, and the figure that counts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from extproc.adapters.traces import read_lines
from extproc.sim.experiment import Load
from extproc.sim.results import Result
from extproc.sim.sessions import WorkloadMaker, WorkloadOptions
from extproc.sim.workloads import WORKLOADS
from extproc.sim.workloads.documents import documents
from extproc.sim.workloads.rl_rollouts import rl_rollouts

_QUESTIONS_EACH = 15
_LONG_PROMPTS_MS = 10_000.0  # a prompt of 100,000 tokens takes longer than 2 s on an idle engine
_STEPS_IN_A_RUN = (
    3  # of those in flight: the beginning and the end, when all start or few are left, count less
)


@dataclass(frozen=True, slots=True)
class Traces:
    """Where public traces are; None: the stand-in that is generated from their quantiles."""

    agents: Path | None = None
    mooncake: Path | None = None
    azure: Path | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One question: whose p99 is lowest, when the fleet is as loaded as it can be?

    Attributes:
        name: of the case.
        make: the workload under a load.
        start: where the search for the knee begins.
        figure: of a result, "ttft_ms" or "rollout_ms".
        options: of the runs that are compared, by the name of the run.
        tuning: of the run in which the knee is found; none of those that are compared.
        sized: `make` offers the load itself.
        ttft_ms: coping is TTFT p95 within this.
    """

    name: str
    make: Callable[[Load], WorkloadMaker]
    start: Load
    figure: str
    options: tuple[tuple[str, WorkloadOptions], ...]
    tuning: WorkloadOptions
    sized: bool = False
    ttft_ms: float = 2000.0

    def value(self, result: Result) -> float | None:
        """The p99 that counts, in ms."""
        p99: float | None = result[self.figure]["p99"]
        return p99


def cases(traces: Traces, seeds: tuple[int, ...], limit: int) -> dict[str, Case]:
    """By name.

    Args:
        traces: used where they are given.
        seeds: of the compared runs; with a trace, of ties and of nothing else.
        limit: requests of a run on a trace.
    """
    seeded = tuple((f"seed {seed}", WorkloadOptions(seed=seed)) for seed in seeds)
    known = WorkloadOptions(seed=0)

    def traced(path: Path | None) -> tuple[tuple[tuple[str, WorkloadOptions], ...], WorkloadOptions]:
        if path is None:
            return seeded, known
        whole = WorkloadOptions(trace=path, read_lines=read_lines, limit=limit)
        held_out = tuple(
            (f"part {i}/4, seed {seed}", replace(whole, part=(i, 4), seed=seed))
            for i, seed in zip((1, 2, 3), seeds, strict=False)
        )
        return held_out, replace(whole, part=(0, 4))

    def rollouts(load: Load, *, group_prompt: bool) -> WorkloadMaker:
        at_once = max(8, int(load.value))
        steps = _STEPS_IN_A_RUN * -(-at_once // 8)
        return partial(rl_rollouts, steps=steps, concurrency=at_once, group_prompt=group_prompt)

    def asked(load: Load) -> WorkloadMaker:
        return partial(documents, questions=_QUESTIONS_EACH * int(load.value))

    def defined(
        name: str, start: Load, make: Callable[[Load], WorkloadMaker], figure: str = "ttft_ms"
    ) -> Case:
        return Case(name, make, start, figure, seeded, known, sized=figure == "rollout_ms")

    def recorded(name: str, start: Load, path: Path | None, ttft_ms: float = 2000.0) -> Case:
        options, tuning = traced(path)
        return Case(name, lambda _: WORKLOADS[name], start, "ttft_ms", options, tuning, ttft_ms=ttft_ms)

    synthetic = conversation = None
    if traces.mooncake is not None:
        synthetic = traces.mooncake / "synthetic_trace.jsonl"
        conversation = traces.mooncake / "conversation_trace.jsonl"
    shared, distinct = partial(rollouts, group_prompt=True), partial(rollouts, group_prompt=False)
    every = (
        defined("rl-rollouts", Load("concurrency", 16), shared, "rollout_ms"),
        defined("rl-rollouts-distinct", Load("concurrency", 16), distinct, "rollout_ms"),
        recorded("coding-agent", Load("concurrency", 4), traces.agents, _LONG_PROMPTS_MS),
        defined("documents", Load("concurrency", 8), asked),
        defined("flood", Load("rate", 10), lambda _: WORKLOADS["flood"]),
        recorded("azure-control", Load("rate", 2), traces.azure),
        recorded("mooncake-conversation", Load("rate", 0.25), conversation, _LONG_PROMPTS_MS),
        recorded("mooncake-synthetic", Load("rate", 0.25), synthetic, _LONG_PROMPTS_MS),
    )
    return {case.name: case for case in every}
