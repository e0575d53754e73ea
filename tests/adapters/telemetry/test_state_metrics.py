from dataclasses import replace
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from extproc.adapters.access_log_server import AccessLogCounters
from extproc.adapters.ext_proc_server import ExtProcCounters
from extproc.adapters.holding import HeldState
from extproc.adapters.kv_stream import KvStreamStats
from extproc.adapters.peer_status import PeersStatus, PeerStatus
from extproc.adapters.prompt_messages import Hashed
from extproc.adapters.prompt_processes import ProcessesState
from extproc.adapters.telemetry.catalogue import STATE_METRICS
from extproc.adapters.telemetry.state_metrics import StateCollector, StateSources
from extproc.core.candidates import PoolFacts
from extproc.core.hashing import REMEMBERED, token_array
from extproc.core.policies.token_load import TokenLoad
from extproc.core.router import Router
from extproc.core.types import Completion, Outcome
from extproc.prompt.piece_cache import PieceCacheStats
from tests.adapters.telemetry.values import Clock
from tests.support.core import COSTS, NAMESPACE, members, metrics, request, stored, worker


class Watched:
    """A router with two workers; KV events of the first are followed."""

    def __init__(self):
        self.clock = Clock(100.0)
        ids = iter(range(1000))
        self.router = Router(
            TokenLoad(COSTS),
            Random(1),
            new_lease_id=lambda: f"lease-{next(ids)}",
            pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision)},
            costs=COSTS,
        )
        self.streams = {worker(0): KvStreamStats(messages=5, gaps=1, replays=2, resets=3, lag_s=0.25)}
        self.ext_proc, self.access_log = ExtProcCounters(), AccessLogCounters()
        self.router.on_membership(members(2), self.clock.now)
        full = {str(worker(0)): "queue", str(worker(1)): "queue"}
        self.held = [HeldState("default", 3, 400, {("", 0): 3}, full, 1.5, 0.5)]
        self.prompt_caches = {
            "default": [PieceCacheStats(70, 30, 5, 4000, 2), PieceCacheStats(7, 3, 1, 400, 0)]
        }
        heard = PeerStatus(
            "10.1.0.1:50060",
            "b/0",
            connected=True,
            silent_s=0.2,
            weight=1.0,
            sequences=7,
            waiting=0,
            error=None,
            connects=3,
        )
        lost = PeerStatus(
            "10.1.0.2:50060",
            "",
            connected=False,
            silent_s=None,
            weight=0.0,
            sequences=0,
            waiting=2,
            error="gone",
        )
        self.peers = PeersStatus(
            "a/0",
            (heard, lost),
            forwarded=5,
            taken=4,
            unknown=1,
            dropped=2,
            listeners=1,
            indexes=6,
            refused={"call": 7, "signal": 8},
        )
        self.registry = CollectorRegistry()
        self.collector = StateCollector(
            StateSources.of(
                self.router,
                self.clock,
                version="1.2.3",
                kv_streams=lambda: self.streams,
                ext_proc=self.ext_proc,
                access_log=self.access_log,
                held=lambda: self.held,
                prompt_caches=lambda: self.prompt_caches,
                prompt_processes=lambda: ProcessesState(2, 5, Hashed(known=40, new=30, blocks=1920)),
                peers=lambda: self.peers,
                recalled=lambda: 9,
                admin_cut=lambda: 10,
                held_faults=lambda: 11,
            )
        )
        self.registry.register(self.collector)

    def value(self, name, n=None, **labels):
        if n is not None:
            labels |= {"pool": "default", "worker": str(worker(n))}
        return self.registry.get_sample_value(f"warmroute_{name}", labels)


@pytest.fixture
def watched():
    return Watched()


def test_peers_are_named_and_those_never_heard_by_their_address(watched):
    assert [watched.value("peer_connected", peer=name) for name in ("b/0", "10.1.0.2:50060")] == [1, 0]
    assert watched.value("peer_silent_seconds", peer="b/0") == 0.2
    assert watched.value("peer_silent_seconds", peer="10.1.0.2:50060") is None
    assert watched.value("peer_sequences", peer="b/0") == 7
    assert watched.value("peer_signals_total", kind="forwarded") == 5
    assert watched.value("peer_signals_total", kind="dropped") == 2
    assert watched.value("peer_connects_total", peer="b/0") == 3
    assert watched.value("peer_listeners") == 1
    assert watched.value("peer_indexes_total") == 6
    assert [watched.value("peer_refused_total", kind=kind) for kind in ("call", "signal")] == [7, 8]


def test_a_peer_with_several_addresses_is_one(watched):
    heard, lost = watched.peers.peers
    again = replace(lost, name="b/0", silent_s=0.2, sequences=7, connects=2)
    watched.peers = replace(watched.peers, peers=(again, heard))
    samples = [
        sample.value
        for family in watched.registry.collect()
        for sample in family.samples
        if sample.labels.get("peer") == "b/0"
    ]
    assert sorted(samples) == [0.2, 1.0, 5.0, 7.0]


def test_load_of_a_worker_is_what_the_router_counts(watched):
    watched.router.on_metrics(worker(0).endpoint, {0: metrics(running=2, waiting=1, kv_usage=0.5)}, 100.0)
    watched.router.on_scrape_failure(worker(1).endpoint)
    watched.clock.now = 101.0
    made = watched.router.schedule(request(range(200)), watched.clock.now)
    number = 0 if made.chosen.worker == worker(0) else 1
    watched.collector.count_routed(made.chosen.worker)
    assert watched.value("worker_active_requests", number) == 1
    assert watched.value("worker_active_requests", 1 - number) == 0
    assert watched.value("worker_context_tokens", number) == 200
    assert watched.value("worker_queued_prefill_tokens", number) == 200
    assert watched.value("worker_queued_prefill_seconds", number) == pytest.approx(0.2)
    assert watched.value("worker_requests_total", number) == 1
    assert watched.value("leases") == 1
    watched.clock.now = 103.5
    assert watched.value("oldest_lease_seconds") == 2.5
    assert watched.value("worker_engine_requests", 0, state="running") == 2
    assert watched.value("worker_engine_requests", 0, state="waiting") == 1
    assert watched.value("worker_kv_usage_ratio", 0) == 0.5
    assert watched.value("worker_metrics_age_seconds", 0) == 3.5
    # Never scraped: since it joined.
    assert watched.value("worker_metrics_age_seconds", 1) == 3.5
    assert watched.value("worker_scrape_failures", 1) == 1


def test_what_encoders_remember_is_summed_over_revisions(watched):
    assert watched.value("prompt_characters_total", pool="default", state="known") == 77
    assert watched.value("prompt_characters_total", pool="default", state="new") == 33
    assert watched.value("prompt_cache_bytes", pool="default") == 4400
    assert watched.value("prompt_cache_evictions_total", pool="default") == 2
    watched.prompt_caches = {}
    assert watched.value("prompt_cache_bytes", pool="default") is None


def test_readiness_of_workers_and_pools(watched):
    for _ in range(3):
        watched.router.on_scrape_failure(worker(1).endpoint)
    assert [watched.value("worker_ready", n) for n in (0, 1)] == [1, 0]
    assert watched.value("workers", pool="default", state="ready") == 1
    assert watched.value("workers", pool="default", state="not-ready") == 1
    assert watched.value("build_info", version="1.2.3", policy="token-load") == 1


def test_workers_of_last_resort_are_ready_and_told(watched):
    def figures():
        return [
            [watched.value(name, n) for n in (0, 1)] for name in ("worker_ready", "worker_last_resort")
        ], watched.value("workers", pool="default", state="ready")

    for n, expected in ((0, ([[0, 1], [0, 0]], 1)), (1, ([[1, 1], [1, 1]], 2))):
        for _ in range(3):
            watched.router.on_page_failure(worker(n).endpoint, watched.clock() - 2.0, slow=True)
        assert figures() == expected


def test_signals_of_kv_events_are_there_for_workers_that_are_followed(watched):
    watched.router.on_kv_events(worker(0), [stored(range(64))], 100.0)
    watched.router.on_kv_trust(worker(0), "complete", trusted=True)
    watched.clock.now = 107.0
    assert watched.value("worker_kv_events_complete", 0) == 1
    assert watched.value("worker_kv_events_complete", 1) is None
    assert watched.value("worker_kv_event_age_seconds", 0) == 7.0
    assert watched.value("worker_kv_event_lag_seconds", 0) == 0.25
    assert watched.value("worker_kv_messages_total", 0) == 5
    assert watched.value("worker_kv_gaps_total", 0) == 1
    assert watched.value("worker_kv_replays_total", 0) == 2
    assert watched.value("worker_kv_resets_total", 0) == 3
    assert watched.value("worker_kv_blocks", 0, source="events") == 4
    assert watched.value("index_blocks") == 4
    assert watched.value("index_memory_bytes") > 0
    assert watched.value("worker_trust_ratio", 0) == 1.0
    assert watched.value("worker_diverging", 0, cause="none") == 0
    assert watched.value("worker_kv_doubtful_blocks", 0) == 0


def test_a_worker_that_diverges_says_why(watched):
    watched.router.on_metrics(worker(0).endpoint, {0: metrics()}, 100.0)
    for number in range(12):
        tokens = range(number * 1000, number * 1000 + 320)
        made = watched.router.schedule(
            request(tokens, stream=True, subset=frozenset({worker(0).endpoint})), 101.0
        )
        completion = Completion(
            Outcome.FINISHED, worker(0).endpoint, 200, 1, cached_tokens=304, upstream_first_body_ms=645.0
        )
        watched.router.release(made.lease_id, completion, 102.0)
    causes = {
        sample.labels["cause"]: sample.value
        for family in watched.registry.collect()
        for sample in family.samples
        if sample.name == "warmroute_worker_diverging" and sample.labels["worker"] == str(worker(0))
    }
    assert causes == {"events-missing": 1.0}
    ratio = watched.value("pool_ttft_prediction_error_ratio", pool="default", figure="bias")
    assert ratio == pytest.approx((320 + 10) / 645 - 1, abs=0.6)


def test_counters_of_the_servers(watched):
    watched.ext_proc.active, watched.ext_proc.routing_errors, watched.ext_proc.passed_through = 3, 2, 7
    watched.access_log.entries, watched.access_log.foreign, watched.access_log.open_streams = 9, 4, 1
    assert watched.value("ext_proc_streams") == 3
    assert watched.value("ext_proc_errors_total", kind="routing") == 2
    assert watched.value("ext_proc_passed_through_total") == 7
    assert watched.value("admin_connections_cut_total") == 10
    assert watched.value("access_log_streams") == 1
    assert watched.value("access_log_entries_total", kind="ours") == 5
    assert watched.value("access_log_entries_total", kind="foreign") == 4


def test_workers_that_left_leave_no_series(watched):
    watched.collector.count_routed(worker(1))
    watched.router.on_membership(members(1), 101.0)
    assert watched.value("worker_ready", 1) is None
    assert watched.value("worker_requests_total", 1) is None
    # One that comes back is counted anew.
    watched.router.on_membership(members(2), 102.0)
    assert watched.value("worker_requests_total", 1) == 0


def test_every_metric_of_the_state_has_a_series(watched):
    watched.router.on_metrics(worker(0).endpoint, {0: metrics(kv_usage=0.1)}, 100.0)
    watched.router.on_kv_events(worker(0), [stored(range(64))], 100.0)
    made = watched.router.schedule(request(range(100), stream=True), 100.0)
    done = Completion(Outcome.FINISHED, made.chosen.worker.endpoint, 200, 1, upstream_first_body_ms=50.0)
    watched.router.release(made.lease_id, done, 101.0)
    found = {sample.name for family in watched.registry.collect() for sample in family.samples}
    assert [metric.name for metric in STATE_METRICS if not found & set(metric.series)] == []


def test_what_is_held_is_told_by_pool_and_what_fills_the_workers(watched):
    assert watched.value("held_requests", pool="default") == 3
    assert watched.value("held_bytes", pool="default") == 400
    assert watched.value("workers_full", pool="default", why="queue") == 2
    assert watched.value("admission_faults_total") == 11
    watched.held = []
    assert watched.value("held_requests", pool="default") is None


def test_what_the_index_keeps_and_has_given_up_is_counted(watched):
    watched.router.index.max_blocks = 5
    watched.router.on_kv_events(worker(0), [stored(range(64))], 100.0)
    watched.router.on_kv_events(worker(1), [stored(range(32))], 100.0)
    assert watched.value("index_entries") == 5
    assert watched.value("index_recalled_workers_total") == 9
    assert watched.value("index_given_up_total") == 1
    before = watched.value("prompt_hash_stretches_total", state="new")
    prompt = token_array(range(5000, 5000 + 64 * 16 + 1))
    assert len(REMEMBERED.prompt_chain(prompt, 16, 1)) == 64
    assert watched.value("prompt_hash_stretches_total", state="new") == before + 1
    assert watched.value("prompt_hash_blocks") == REMEMBERED.blocks + 1920
    for state, here, elsewhere in (("known", REMEMBERED.hits, 40), ("new", REMEMBERED.misses, 30)):
        assert watched.value("prompt_hash_stretches_total", state=state) == here + elsewhere


def test_processes_for_long_prompts_are_counted(watched):
    assert watched.value("prompt_processes") == 2
    assert watched.value("prompt_processes_lost_total") == 5
