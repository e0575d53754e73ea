"""Floods beside cold requests, and stragglers beside short answers: nobody starves, and length counts."""

from dataclasses import replace
from functools import cache
from random import Random

from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.hardware import ENGINE_PRESETS
from extproc.sim.measures import percentile
from extproc.sim.policies import POLICIES
from extproc.sim.results import result_of
from extproc.sim.sessions import Session, Turn, Workload, WorkloadOptions, offered
from extproc.sim.workloads.flood import flood
from extproc.sim.workloads.history import History, key_of

ENGINE = ENGINE_PRESETS["medium"].engine(16)
# Reads its context slower than an 8B model on an A100 and faster than on an L4: long ones are felt.
SLOW_READER = replace(ENGINE, time=replace(ENGINE.time, context_ms_per_token=2e-4))
SEEDS = range(3)
FROM_S, TO_S, DURATION_S = 5.0, 20.0, 22.0


def run(workload, policy, seed=0, replicas=4, **settings):
    fields = {"replicas": replicas, "engine": ENGINE, "seed": seed, **settings}
    return Fleet(workload, POLICIES[policy], FleetSettings(**fields)).run()


@cache
def capacity():
    """Requests of the flood that one worker completes in a second when it never runs out of them."""
    hot = flood(WorkloadOptions(), duration_s=9.0, cold_rate=1e-9, flood_from_s=0.0, flood_to_s=9.0)
    measures = run(offered(hot, concurrency=ENGINE.max_num_seqs), "round-robin", replicas=1)
    return len(measures.ttft) / (measures.ended - measures.began)


def ttft(policy, *, flooded, seeds=SEEDS):
    """(times of cold requests, times of the flood), over all seeds."""
    cold, hot = [], []
    for seed in seeds:
        rate = 2.0 * capacity()
        workload = flood(
            WorkloadOptions(seed=seed),
            duration_s=DURATION_S,
            flood_from_s=FROM_S,
            flood_to_s=TO_S,
            hot_rate=rate if flooded else 1e-9,
            cold_rate=0.05 * rate,
        )
        measures = run(workload, policy, seed)
        cold_group = measures.groups["cold"]
        for seconds, group in zip(measures.ttft, measures.group, strict=True):
            (cold if group == cold_group else hot).append(seconds)
    return sorted(cold), sorted(hot)


def test_cold_requests_do_not_starve_beside_a_flood_on_one_prefix():
    alone, _ = ttft("token-load", flooded=False)
    cold, hot = ttft("token-load", flooded=True)
    _, herded = ttft("kv-affinity", flooded=True, seeds=(0,))
    assert len(cold) > 250
    assert percentile(cold, 0.99) <= 2.0 * percentile(alone, 0.99)
    assert percentile(hot, 0.99) < 0.1 * percentile(herded, 0.99)


def stragglers(seed):
    """Many short answers, and a few long generations of another tenant; no prompt is like another."""
    rng, at, sessions = Random(seed), 0.0, []
    for number in range(1400):
        slow = rng.random() < 0.02
        output = round((6000 if slow else 300) * rng.uniform(0.7, 1.3))
        history = History(ENGINE.block_size, key_of(seed, number))
        history.extend(0, 100 + output)
        tenant = "reports" if slow else "chat"
        turn = Turn(100, output, history.blocks)
        sessions.append(Session(str(number), (turn,), arrival_s=at, tenant=tenant))
        at += rng.expovariate(30.0)
    return Workload("stragglers", ENGINE.block_size, sessions)


def decode_cv(policy):
    """Mean over seeds, after lengths have been seen: single runs differ by half, as long ones meet or not."""
    runs = [run(stragglers(seed), policy, seed, engine=SLOW_READER, warmup_requests=500) for seed in range(6)]
    return sum(result_of(policy, each, {})["decode_blocks_cv"] for each in runs) / len(runs)


def test_with_learned_lengths_decoding_is_more_even_than_with_counted_requests():
    assert decode_cv("token-load") < 0.85 * decode_cv("least-load")
