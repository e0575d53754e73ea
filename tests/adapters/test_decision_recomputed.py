"""Every decision can be made again from its own line in the log, by the formula of its policy's docstring."""

import dataclasses
import json
import math
from bisect import bisect_left
from random import Random

import pytest
import xxhash

from extproc.adapters.decision_writer import DecisionLog
from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings, RequestFacts, WorkerFacts, price
from extproc.core.policies import POLICIES
from extproc.core.router import Router
from extproc.core.step_model import StepCoefficients
from extproc.core.ttft_model import TtftCoefficients
from extproc.core.types import BlockRemoved, Candidate, Completion, Outcome, Tier
from tests.support.core import NAMESPACE, members, metrics, request, stored, worker

WORKERS = 5
REQUESTS = 400


def traffic(path):
    """The log of requests under every policy, over workers that differ in all that prices depend on."""
    rng = Random(11)
    ids = iter(range(10**6))
    costs = CostSettings(prefill_tokens_per_s=2_000.0, max_extra_ttft_ms=150.0, max_warm_wait_ms=400.0)
    made = {name: policy(costs) for name, policy in POLICIES.items()}
    router = Router(
        made["token-load"],
        Random(5),
        new_lease_id=lambda: str(next(ids)),
        others=made.values(),
        shadow=[policy(costs) for policy in POLICIES.values()],
        pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, 16)},
        costs=costs,
    )
    router.on_membership(members(WORKERS), 0.0)
    shelves = [[rng.randrange(1, 9999) for _ in range(rng.choice((100, 700, 2500)))] for _ in range(6)]
    for n in range(WORKERS - 1):  # the last one publishes nothing
        for m, shelf in enumerate(rng.sample(shelves, 3)):
            router.on_kv_events(worker(n), [stored(shelf, first_handle=1 + 1000 * m)], 0.0)
        router.on_kv_events(worker(n), [stored(shelves[n], first_handle=9001, tier=Tier.CPU)], 0.0)
        router.on_kv_events(worker(n), [BlockRemoved(tuple(range(3, 9)))], 0.0)
    open_leases = []
    log = DecisionLog(str(path), on_error=pytest.fail)
    names = list(POLICIES)
    for number in range(REQUESTS):
        now = number * 0.05
        if number % 20 == 0:
            n = rng.randrange(WORKERS)
            seen = metrics(
                running=rng.randrange(4), waiting=rng.randrange(3), kv_usage=rng.random(),
                num_gpu_blocks=rng.choice((60, 200, 10_000)),
            )  # fmt: skip
            router.on_metrics(worker(n).endpoint, {0: seen}, now)
        tokens = rng.choice(shelves)[: rng.choice((80, 1000, 9999))] + [number] * rng.randrange(40)
        ask = request(
            tokens,
            request_id=str(number),
            policy=names[number % len(names)],
            session_key=rng.choice(("anna", "bert", None)),
            max_output=rng.choice((8, 300)),
            stream=True,
        )
        if number % 17 == 0:
            ask = dataclasses.replace(ask, prompts=(), load_only="too-long")
        open_leases.append(router.schedule(ask, now).lease_id)
        if len(open_leases) > rng.choice((0, 4, 14)):
            lease_id = open_leases.pop(rng.randrange(len(open_leases)))
            took = rng.uniform(20.0, 600.0)
            done = Completion(
                Outcome.FINISHED, first_body_ms=took, upstream_first_body_ms=took, duration_ms=took * 3,
                cached_tokens=rng.choice((0, 64, 256)), output_tokens=30,
            )  # fmt: skip
            log.write(router.release(lease_id, done, now))
    for lease_id in open_leases:
        log.write(router.release(lease_id, Completion(Outcome.CANCELLED), REQUESTS * 0.05))
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return traffic(tmp_path_factory.mktemp("log") / "decisions.jsonl")


def cost_of(line, candidate):
    """The price, from what the line says it was made from."""
    facts = {
        kind: line["facts"][kind] | candidate["facts"][kind] for kind in ("request", "worker")
    }  # what all share, and this one's own
    facts["worker"]["ttft"] = TtftCoefficients(**facts["worker"]["ttft"])
    facts["worker"]["step"] = StepCoefficients(**facts["worker"]["step"])
    return price(
        RequestFacts(**facts["request"]), WorkerFacts(**facts["worker"]), CostSettings(**line["settings"])
    )


def hit(candidate):
    return candidate["cached_tokens"] + candidate["offloaded_tokens"]


def bound(candidates):
    return math.ceil(1.25 * (sum(c["active"] for c in candidates) + 1) / len(candidates))


def token_load(line, candidates, inputs):
    settings = line["settings"]
    costs = {c["worker"]: cost_of(line, c) for c in candidates}
    ordered = sorted(candidates, key=lambda c: (costs[c["worker"]].total_ms, c["draw"]))
    best = costs[ordered[0]["worker"]].total_ms
    near = [c for c in ordered if costs[c["worker"]].total_ms <= best + max(settings["tie_ms"], 0.02 * best)]
    near.sort(key=lambda c: (-hit(c), c["active"]))
    ordered[: len(near)] = near
    cold = min((costs[c["worker"]].ttft_ms for c in candidates if not hit(c)), default=math.inf)

    def denied(c):
        cost = costs[c["worker"]]
        extra = cost.ttft_ms - cold
        return hit(c) and (
            extra > settings["max_extra_ttft_ms"]
            or (extra > 0 and cost.queue_ms > settings["max_warm_wait_ms"])
        )

    ordered.sort(key=lambda c: bool(denied(c)))
    return elsewhere(ordered, costs, settings)


def elsewhere(ordered, costs, settings):
    """`extproc.core.share_bounds`, where no worker is of the cold pool."""

    def full(c):
        shares, kept = c["shares"], min(settings["cold_share"], c["shares"]["cold_demand"])
        return shares["prefix_share"] >= settings["max_prefix_share"] or (
            kept > 0 and shares["warm_share"] >= 1 - kept
        )

    first = ordered[0]
    if first["shares"]["warm"] is False:
        ttft = {name: cost.ttft_ms for name, cost in costs.items()}
        soon = settings["max_cold_slowdown"] * min(ttft.values()) + 25.0
        kept = [
            c
            for c in ordered
            if ttft[c["worker"]] <= soon and c["shares"]["cold_prefill"] < settings["cold_share"]
        ]
        return first if ttft[first["worker"]] <= soon or not kept else kept[0]
    if not first["shares"]["warm"] or not full(first):
        return first
    latest = costs[first["worker"]].queue_ms + max(cost.prefill_ms for cost in costs.values())
    able = [c for c in ordered if not full(c) and costs[c["worker"]].queue_ms <= latest]
    return min(able, key=lambda c: hit(c) <= 0 or hit(c) < hit(first) / 2, default=first)


def session_affinity(line, candidates, inputs):
    ring = sorted(
        (xxhash.xxh3_64_intdigest(f"{c['worker']}/{n}".encode()), c["worker"], c["active"])
        for c in candidates
        for n in range(160)
    )
    start = bisect_left([point for point, *_ in ring], int(inputs["session"], 16))
    walk = [*ring[start:], *ring[:start]]
    chosen = next((name for _, name, active in walk if active < bound(candidates)), walk[0][1])
    return next(c for c in candidates if c["worker"] == chosen)


BY_HAND = {
    "token-load": token_load,
    "prefix-affinity": lambda line, candidates, inputs: min(
        candidates, key=lambda c: (c["active"] >= bound(candidates), -hit(c), c["active"], c["draw"])
    ),
    "session-affinity": session_affinity,
    "least-load": lambda line, candidates, inputs: min(
        candidates, key=lambda c: (c["queued_prefill_tokens"], c["active"], c["draw"])
    ),
    "kv-affinity": lambda line, candidates, inputs: min(candidates, key=lambda c: (-hit(c), c["draw"])),
    "round-robin": lambda line, candidates, inputs: next(
        c for c in candidates if c["position"] == inputs["turn"] % len(candidates)
    ),
}


def test_every_policy_can_be_computed_by_hand():
    assert set(BY_HAND) == set(POLICIES)


def test_the_lines_are_about_all_kinds_of_decisions(lines):
    assert len(lines) == REQUESTS
    assert {line["policy"] for line in lines} == set(POLICIES)
    reasons = {line["decision"] for line in lines}
    assert reasons > {"warm-exact", "warm-partial", "load-only", "session", "session-moved", "round-robin"}
    assert reasons & {"cold-idle", "cold-busy"}
    assert any(c["confidence"] < 1 for line in lines for c in line["candidate_workers"])
    assert any(c["offloaded_tokens"] for line in lines for c in line["candidate_workers"])
    assert any(c["kv_risk_ms"] for line in lines for c in line["candidate_workers"])


def test_prices_can_be_computed_again(lines):
    for line in lines:
        for candidate in line["candidate_workers"]:
            cost = cost_of(line, candidate)
            for term in ("queue_ms", "prefill_ms", "decode_ms", "kv_risk_ms", "total_ms"):
                assert getattr(cost, term) == pytest.approx(candidate[term], abs=0.001)


def test_the_winner_can_be_computed_again(lines):
    for line in lines:
        winner = BY_HAND[line["policy"]](line, line["candidate_workers"], line["inputs"])
        assert winner["worker"] == line["selected_worker"], (line["policy"], line["request_id"])


def test_what_a_shadow_would_have_chosen_can_be_computed_again(lines):
    for line in lines:
        assert set(line["shadow"]) == set(POLICIES)
        for policy, choice in line["shadow"].items():
            winner = BY_HAND[policy](line, line["candidate_workers"], choice["inputs"])
            assert winner["worker"] == choice["worker"], (policy, line["request_id"])


def test_chance_decides_where_everything_is_equal(lines):
    draws = [tuple(c["draw"] for c in line["candidate_workers"]) for line in lines]
    assert all(sorted(draw) == list(range(WORKERS)) for draw in draws)
    firsts = {line["candidate_workers"][0]["draw"] for line in lines}
    assert firsts == set(range(WORKERS))


def test_nothing_a_candidate_is_judged_by_is_missing(lines):
    """A field that is added to what candidates are judged by must come into the log as well."""
    elsewhere = {"cost", "priced"}  # its terms, and `facts`
    for candidate in lines[0]["candidate_workers"]:
        assert {field.name for field in dataclasses.fields(Candidate)} - elsewhere <= set(candidate)
    for kind, facts in (("request", RequestFacts), ("worker", WorkerFacts)):
        names = set(lines[0]["facts"][kind]) | set(lines[0]["candidate_workers"][0]["facts"][kind])
        assert names == {field.name for field in dataclasses.fields(facts)}
