"""Runs of the comparison: the knee of each case, every policy there, and what follows from it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import fmean, median

from extproc.cli.simulate_jobs import policy_maker
from extproc.sim.experiment import Load, find_knee, run_one
from extproc.sim.fleet import FleetSettings
from extproc.sim.hardware import ENGINE_PRESETS
from extproc.sim.results import Result, within
from extproc.sim.routing import PolicyUnavailableError
from extproc.sim.sessions import WorkloadOptions
from loadtests.standing.cases import Case, Traces, cases

BOUND = "oracle"
_MAX_MODEL_LEN = 200_000


@dataclass(frozen=True, slots=True)
class Setup:
    """What every run shares; small enough to be sent to other processes."""

    traces: Traces
    seeds: tuple[int, ...]
    limit: int
    replicas: int = 4
    preset: str = "medium"

    def cases(self) -> dict[str, Case]:
        """By name."""
        return cases(self.traces, self.seeds, self.limit)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in one case, over all runs.

    Attributes:
        p99_ms: of each run; None where nothing was answered or something failed.
        cached: mean share of prompt tokens found in caches.
        cv: mean coefficient of variation of active decode blocks.
        skipped: why the policy could not run.
    """

    policy: str
    p99_ms: tuple[float | None, ...] = ()
    cached: float = 0.0
    cv: float = 0.0
    skipped: str | None = None

    @property
    def middle_ms(self) -> float:
        """The median over runs; infinite where a run has none."""
        return median(float("inf") if value is None else value for value in self.p99_ms)


def knee_of(setup: Setup, name: str) -> Load:
    """The highest load at which the bound copes in the tuning run: no policy that is compared has a say."""
    case = setup.cases()[name]

    def run(load: Load) -> Result:
        return _run(setup, case, BOUND, case.tuning, load)

    results = [r for r in find_knee(run, case.start, case.ttft_ms) if within(r, case.ttft_ms)]
    kind = case.start.kind
    return Load(kind, results[-1][kind]) if results else case.start


def row_of(setup: Setup, name: str, policy: str, load: Load) -> Row:
    """One policy at this load, in every run of the case."""
    case = setup.cases()[name]
    try:
        results = [_run(setup, case, policy, options, load) for _, options in case.options]
    except PolicyUnavailableError as error:
        return Row(policy, skipped=str(error))
    return Row(
        policy,
        tuple(None if r["failed"] else case.value(r) for r in results),
        fmean(r["cached_token_share"] or 0.0 for r in results),
        fmean(r["decode_blocks_cv"] or 0.0 for r in results),
    )


def compare(
    setup: Setup,
    names: Sequence[str],
    policies: Sequence[str],
    loads: dict[str, Load],
    processes: int,
    told: Callable[[str], None],
) -> Iterator[tuple[str, Load, list[Row]]]:
    """(case, its load, rows) of each case, best first.

    Args:
        setup: of all runs.
        names: of cases.
        policies: by name.
        loads: of cases whose knee is not to be searched for.
        processes: at once.
        told: is given each step as it is done.
    """
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        sought = {name: pool.submit(knee_of, setup, name) for name in names if name not in loads}
        for name in names:
            load = loads[name] if name in loads else sought[name].result()
            told(f"{name}: at {load.kind} {load.value:g}")
            rows = []
            for future in [pool.submit(row_of, setup, name, policy, load) for policy in policies]:
                rows.append(future.result())
                told(f"{name}: {rows[-1].policy} done")
            yield (
                name,
                load,
                sorted(rows, key=lambda row: (row.skipped is not None, row.middle_ms if row.p99_ms else 0)),
            )


def _run(setup: Setup, case: Case, policy: str, options: WorkloadOptions, load: Load) -> Result:
    make = case.make(load)
    # A few prompts of the traces are longer than the preset's models read; no policy is to fail for that.
    preset = replace(ENGINE_PRESETS[setup.preset], max_model_len=_MAX_MODEL_LEN)
    settings = FleetSettings(
        replicas=setup.replicas,
        engine=preset.engine(make(options).block_size),
        seed=options.seed,
        # Clients of a closed loop all begin at once, which no router can help.
        warmup_requests=int(load.value) if load.kind == "concurrency" else 0,
    )
    result = run_one(make, options, policy, policy_maker(policy), settings, None if case.sized else load)
    return {**result, load.kind: load.value}
