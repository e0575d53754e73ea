"""Small workloads and fleets with answers that can be computed by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from extproc.sim.engine_types import EngineConfig
from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.measures import Measures
from extproc.sim.routing import NullRouter
from extproc.sim.sessions import Session, Turn, Workload
from extproc.sim.time_model import TimeModel

BLOCK = 16
TIME = TimeModel(5.0, 0.1, 0.0, 0.25, 0.0)
ENGINE = EngineConfig(
    block_size=BLOCK,
    num_gpu_blocks=50_000,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    max_model_len=20_000,
    time=TIME,
)


def turn(prompt: int, output: int, shared: Sequence[int] = (), unique: int = 0, **fields) -> Turn:
    """A turn whose chain begins with `shared` and goes on with blocks of its own (`unique` names it)."""
    count = (prompt + output) // BLOCK
    own = range(len(shared), count)
    return Turn(prompt, output, (*shared[:count], *((unique + 1) << 32 | at for at in own)), **fields)


def alone(turns: Iterable[Turn], every_s: float) -> Workload:
    """Single requests, one every `every_s` seconds."""
    sessions = [Session(str(at), (one,), arrival_s=at * every_s) for at, one in enumerate(turns)]
    return Workload("alone", BLOCK, sessions)


def documents(requests: int, count: int = 20, seed: int = 0, every_s: float = 0.02) -> Workload:
    """Questions on `count` documents of 40 blocks, at random."""
    rng = Random(seed)
    turns = [
        turn(40 * BLOCK + 20, 30, range(1000 * d, 1000 * d + 40), at)
        for at, d in enumerate(rng.randrange(count) for _ in range(requests))
    ]
    return alone(turns, every_s)


def simulate(workload: Workload, make, replicas: int = 3, **settings) -> Measures:
    fields = {"network_s": 0.0, "kv_delay_s": 0.0, **settings}
    return Fleet(workload, make, FleetSettings(replicas=replicas, engine=ENGINE, **fields)).run()


def cached_share(measures: Measures) -> float:
    return sum(measures.cached.values()) / sum(measures.prompt.values())


class Recorder(NullRouter):
    """Sends everything to the workers given, in turn, and keeps what it is told."""

    name = "recorder"

    def __init__(self, facts, seed, *, workers=(0,)):
        self.facts, self.workers, self.told, self.requests = facts, workers, [], []

    def route(self, request, now):
        self.told.append(("route", request.request_id, now))
        self.requests.append(request)
        return self.workers[(len(self.requests) - 1) % len(self.workers)]

    def on_first_token(self, request_id, now):
        self.told.append(("first", request_id, now))

    def on_finished(self, request_id, cached_tokens, output_tokens, now):
        self.told.append(("finished", request_id, cached_tokens, output_tokens, now))

    def on_kv_events(self, worker, events, now):
        self.told.append(("events", worker, events, now))

    def on_kv_gap(self, worker, now):
        self.told.append(("gap", worker, now))

    def on_metrics(self, worker, metrics, now):
        self.told.append(("metrics", worker, metrics, now))

    def of(self, kind):
        return [entry for entry in self.told if entry[0] == kind]


def recorded(workload: Workload, replicas: int = 1, workers=(0,), engine=ENGINE, **settings):
    """(recorder, measures) of a run."""
    made = []

    def make(facts, seed):
        made.append(Recorder(facts, seed, workers=workers))
        return made[0]

    fields = {"network_s": 0.0, "kv_delay_s": 0.0, **settings}
    measures = Fleet(workload, make, FleetSettings(replicas=replicas, engine=engine, **fields)).run()
    return made[0], measures


def renamed(workload: Workload, **fields) -> Workload:
    return replace(workload, **fields)
