"""One policy under one load, and under rising load until it no longer copes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.results import Result, result_of, within
from extproc.sim.routing import RouterMaker
from extproc.sim.sessions import WorkloadMaker, WorkloadOptions, offered

LoadKind = Literal["rate", "concurrency"]
_DOUBLINGS = 12
_HALVINGS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """What is offered: sessions per second, or sessions at once."""

    kind: LoadKind
    value: float

    def scaled(self, value: float) -> "Load":
        """The same kind of load; a concurrency is a whole number."""
        return Load(self.kind, value if self.kind == "rate" else max(1.0, float(round(value))))


def run_one(
    make_workload: WorkloadMaker,
    options: WorkloadOptions,
    policy: str,
    make: RouterMaker,
    settings: FleetSettings,
    load: Load | None,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Simulate; `load` None is the workload's own."""
    workload = make_workload(options)
    shown: dict[str, float] = {}
    if load is not None and load.kind == "rate":
        workload = offered(workload, rate=load.value, seed=options.seed)
        shown = {"rate": load.value}
    elif load is not None:
        workload = offered(workload, concurrency=int(load.value))
        shown = {"concurrency": int(load.value)}
    fleet = Fleet(workload, make, settings, progress)
    try:
        measures = fleet.run()
    finally:
        # A peer that hosts a real service has something to stop.
        getattr(fleet.router, "close", _nothing)()
    return result_of(policy, measures, shown)


def find_knee(run: Callable[[Load], Result], start: Load, knee_ttft_ms: float) -> list[Result]:
    """Results under rising load: doubled from `start` until the fleet does not cope, then between.

    Four halvings (on a logarithmic scale) leave the knee known to about 4 %. Every run that was needed is
    in the result, in ascending order of load.
    """
    results: dict[float, Result] = {}
    load = start.scaled(start.value)
    good: Load | None = None
    for _ in range(_DOUBLINGS):
        result = results[load.value] = run(load)
        if not within(result, knee_ttft_ms):
            break
        good, load = load, load.scaled(load.value * 2)
    else:
        return [results[value] for value in sorted(results)]
    bad = load
    for _ in range(_HALVINGS if good is not None else 0):
        assert good is not None  # noqa: S101 - the loop says so
        middle = good.scaled((good.value * bad.value) ** 0.5)
        if middle.value in (good.value, bad.value):
            break
        result = results[middle.value] = run(middle)
        good, bad = (middle, bad) if within(result, knee_ttft_ms) else (good, middle)
    return [results[value] for value in sorted(results)]


def _nothing() -> None:
    """What most routers do when they are no longer needed."""
