"""A router with its decision log and admin server, and no engines: decisions come and end as a test says.

async with Watched(tmp_path) as watched:
    decision = watched.route("request-1", range(1, 200))
    watched.end(decision, cached_tokens=0)
    watched.url                     # of the admin server
    watched.lines()                 # of the decision log
"""

import json
import time
from random import Random

from extproc.adapters.admin_server import AdminServer, AdminSources
from extproc.adapters.decision_writer import DecisionLog, LogSettings
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.adapters.routing_service import ServiceCounters
from extproc.adapters.status import StatusBoard
from extproc.adapters.telemetry.registry import MetricsPage
from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.policies import LeastLoad, TokenLoad
from extproc.core.router import Router
from extproc.core.types import Completion, Outcome
from tests.support.core import BLOCK, NAMESPACE, members, metrics, request, stored, worker

WORKERS = 3


class Watched:
    def __init__(self, directory, *, token=None, listen="127.0.0.1:0", workers=WORKERS, redact=()):
        ids = iter(range(10**9))
        costs = CostSettings()
        self.router = Router(
            TokenLoad(costs),
            Random(1),
            new_lease_id=lambda: f"lease-{next(ids)}",
            shadow=[LeastLoad(costs)],
            pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, BLOCK)},
            costs=costs,
        )
        self.file = directory / "decisions.jsonl"
        self.recent = RecentDecisions()
        settings = LogSettings(redact=frozenset(redact))
        self.log = DecisionLog(str(self.file), print, settings, self.recent)
        self.counters = ServiceCounters()
        self.access_log_streams = 1
        self.scrape_errors = {}
        self.clock = time.monotonic
        self.board = StatusBoard(
            router=self.router,
            counters=self.counters,
            log=self.log,
            recent=self.recent,
            clock=self.clock,
            address="127.0.0.1:50051",
            shadow=("least-load",),
            pools_with_events=frozenset({"default"}),
            access_log_streams=lambda: self.access_log_streams,
            scrape_errors=self.scrape_errors,
        )
        sources = AdminSources(
            ready=lambda: any(self.router.table.is_ready(s, self.clock()) for s in self.router.table.all()),
            state=self.board.state,
            explained=self.board.explained,
            metrics=lambda accept: MetricsPage(f"# {accept}\nup 1\n".encode(), "text/plain; version=0.0.4"),
        )
        self.admin = AdminServer(sources, token)
        self._listen = listen
        self.router.on_membership(members(workers), self.clock())
        for n in range(workers):
            self.scrape(n)
            self.router.on_kv_trust(worker(n), "complete, and in step with the engine", trusted=True)

    async def __aenter__(self):
        await self.admin.start(self._listen)
        return self

    async def __aexit__(self, *_):
        await self.admin.close()
        self.log.close()

    @property
    def url(self):
        return f"http://{self.admin.address}"

    def scrape(self, n, **fields):
        self.router.on_metrics(
            worker(n).endpoint, {0: metrics(kv_usage=0.25, num_gpu_blocks=2000, **fields)}, self.clock()
        )

    def warm(self, n, tokens):
        self.router.on_kv_events(worker(n), [stored(list(tokens))], self.clock())

    def route(self, request_id, tokens=range(1, 400), **fields):
        decision = self.router.schedule(
            request(tokens, request_id=request_id, stream=True, **fields), self.clock()
        )
        self.counters.routed += 1
        return decision

    def end(self, decision, outcome=Outcome.FINISHED, **fields):
        shown = {"served_by": decision.chosen.worker.endpoint, "status": 200, "attempts": 1, **fields}
        released = self.router.release(decision.lease_id, Completion(outcome, **shown), self.clock())
        if released.prediction_was_exact is not None:
            self.counters.exact += released.prediction_was_exact
            self.counters.mispredicted += not released.prediction_was_exact
        self.log.write(released)
        return released

    def ask(self, request_id, tokens=range(1, 400), **fields):
        """One whole request, as predicted."""
        decision = self.route(request_id, tokens)
        told = {
            "cached_tokens": decision.chosen.cached_tokens,
            "output_tokens": 20,
            "first_body_ms": decision.chosen.cost.ttft_ms + 3.0,
            "upstream_first_body_ms": decision.chosen.cost.ttft_ms + 2.0,
            "duration_ms": 250.0,
        }
        self.end(decision, **told | fields)
        return decision

    def lines(self):
        return [json.loads(line) for line in self.file.read_text().splitlines()]
