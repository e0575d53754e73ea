import json
from dataclasses import replace

import pytest

from extproc.core.errors import NoEndpointError
from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.policies import POLICIES
from extproc.sim.results import result_of
from extproc.sim.routing import NullRouter
from extproc.sim.sessions import Session, Workload
from tests.support.fleet import BLOCK, ENGINE, TIME, Recorder, alone, documents, recorded, simulate, turn


def test_a_request_takes_network_and_steps():
    router, measures = recorded(alone([turn(100, 3)], 1.0), network_s=0.01)
    first = 0.01 + (TIME.base_ms + 100 * TIME.prefill_ms_per_token) / 1000 + 0.01
    assert list(measures.ttft) == pytest.approx([first])
    decode = (TIME.base_ms + TIME.decode_ms_per_sequence) / 1000
    assert list(measures.e2e) == pytest.approx([first + 2 * decode])
    assert list(measures.tpot) == pytest.approx([decode])
    assert [entry[0] for entry in router.told if entry[0] in ("route", "first", "finished")] == [
        "route",
        "first",
        "finished",
    ]
    assert router.of("finished")[0][2:4] == (0, 3)


def test_a_router_sees_the_blocks_that_can_be_hit():
    router, _ = recorded(alone([turn(3 * BLOCK, 5 * BLOCK, max_output_tokens=99)], 1.0))
    (request,) = router.requests
    assert request.prefix == tuple(request.truth.blocks[:2])
    assert (request.prompt_tokens, request.block_size, request.max_output_tokens) == (48, BLOCK, 99)


def test_turns_follow_each_other_after_their_think_time():
    turns = (turn(100, 2), turn(150, 2, think_s=3.0), turn(200, 2, think_s=1.0))
    workload = Workload("w", BLOCK, [Session("s", turns, arrival_s=5.0)])
    router, measures = recorded(workload)
    sent = [entry[2] for entry in router.of("route")]
    ended = [entry[4] for entry in router.of("finished")]
    assert sent == pytest.approx([5.0, ended[0] + 3.0, ended[1] + 1.0])
    assert list(measures.rollout) == pytest.approx([ended[2] - 5.0])
    assert [r.turn for r in router.requests] == [0, 1, 2]


def test_kv_events_come_late_and_in_order():
    router, _ = recorded(alone([turn(100, 40, unique=at) for at in range(3)], 0.001), kv_delay_s=0.05)
    events = router.of("events")
    assert [entry[3] for entry in events] == sorted(entry[3] for entry in events)
    assert events[0][3] == pytest.approx(router.of("first")[0][2] + 0.05)
    assert all(event.chained for entry in events for event in entry[2])


def stored(router):
    return [block for entry in router.of("events") for event in entry[2] for block in event.block_hashes]


def test_lost_events_come_back_by_replay_in_order_and_later():
    workload = alone([turn(100, 60, unique=at) for at in range(20)], 0.05)
    whole, _ = recorded(workload)
    lossy, _ = recorded(workload, kv_loss=0.3, replay_s=0.2)
    assert not lossy.of("gap")
    assert stored(lossy) == stored(whole)[: len(stored(lossy))]
    assert len(stored(lossy)) > 50
    times = [entry[3] for entry in lossy.of("events")]
    assert times == sorted(times)
    assert times != [entry[3] for entry in whole.of("events")][: len(times)]


def test_without_replay_lost_events_are_a_gap():
    workload = alone([turn(100, 60, unique=at) for at in range(20)], 0.05)
    whole, _ = recorded(workload)
    lossy, _ = recorded(workload, kv_loss=0.3, kv_replay=False)
    assert lossy.of("gap")
    assert set(stored(lossy)) < set(stored(whole))


def test_metrics_come_at_their_interval_from_every_worker():
    router, _ = recorded(alone([turn(100, 2, unique=at) for at in range(11)], 1.0), replicas=2)
    times = {worker: [e[3] for e in router.of("metrics") if e[1] == worker] for worker in (0, 1)}
    assert times[0][:4] == [0.0, 1.0, 2.0, 3.0]
    assert times[1][:4] == [0.5, 1.5, 2.5, 3.5]


def test_a_router_may_read_metrics_more_often():
    class Impatient(Recorder):
        scrape_interval_s = 0.1

    made = []
    workload = alone([turn(100, 2, unique=at) for at in range(3)], 1.0)
    simulate(workload, lambda facts, seed: made.append(Impatient(facts, seed)) or made[0], replicas=1)
    times = [entry[3] for entry in made[0].of("metrics")]
    assert times[:4] == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_request_that_is_too_long_fails_and_ends_its_session():
    turns = (turn(100, 2), turn(ENGINE.max_model_len, 2), turn(300, 2))
    workload = Workload("w", BLOCK, [Session("s", turns)], concurrency=1)
    router, measures = recorded(workload)
    assert (measures.requests, measures.failed, len(measures.rollout)) == (2, 1, 0)
    assert measures.failures == {"longer than max_model_len": 1}
    assert router.of("finished")[1][2:4] == (None, None)


class Refusing(NullRouter):
    name = "refusing"

    def __init__(self, facts, seed):
        pass

    def route(self, request, now):
        raise NoEndpointError("no worker")


def test_a_request_that_nobody_may_serve_fails():
    measures = simulate(alone([turn(100, 2)] * 3, 1.0), Refusing)
    assert (measures.requests, measures.failed, measures.failures) == (3, 3, {"no worker": 3})


def test_warm_up_requests_are_served_and_not_measured():
    _, measures = recorded(alone([turn(100, 2, range(6), at) for at in range(10)], 1.0), warmup_requests=4)
    assert (measures.requests, len(measures.ttft), len(measures.rollout)) == (6, 6, 6)
    assert measures.began == 4.0
    assert sum(measures.cached.values()) == 6 * 6 * BLOCK


def test_blocks_of_decoding_sequences_are_balanced_or_not():
    turns = [turn(800, 600, unique=at) for at in range(2)]
    _, even = recorded(alone(turns, 0.0), replicas=2, workers=(0, 1))
    _, uneven = recorded(alone(turns, 0.0), replicas=2, workers=(0,))
    assert even.cv_sum == 0
    assert uneven.cv_sum / uneven.cv_bins == pytest.approx(1.0)
    assert uneven.sent == [2, 0]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_seed_one_result(name):
    def result() -> str:
        measures = simulate(documents(150, seed=3, every_s=0.004), POLICIES[name], seed=5, kv_loss=0.1)
        return json.dumps(result_of(name, measures, {}))

    assert result() == result()


def test_seeds_differ():
    runs = [simulate(documents(60, every_s=1.0), POLICIES["least-load"], seed=seed) for seed in (1, 2)]
    assert runs[0].ttft != runs[1].ttft


def test_progress_is_told():
    told = []
    settings = FleetSettings(replicas=2, engine=ENGINE)
    Fleet(documents(600, every_s=0.001), POLICIES["round-robin"], settings, told.append).run()
    assert told == [256, 512]


def test_block_sizes_must_agree():
    with pytest.raises(ValueError, match="make them equal"):
        Fleet(replace(documents(1), block_size=32), POLICIES["oracle"], FleetSettings(engine=ENGINE))


@pytest.mark.parametrize(
    "wrong",
    [{"replicas": 0}, {"network_s": -1.0}, {"scrape_interval_s": 0.0}, {"kv_loss": 1.5}, {"bin_s": 0.0}],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FleetSettings(**wrong)


def test_engines_without_kv_events_publish_none():
    router, measures = recorded(alone([turn(100, 40, range(6), at) for at in range(3)], 1.0), kv_events=False)
    assert not router.of("events")
    assert not router.facts.kv_events
    assert sum(measures.cached.values()) == 2 * 6 * BLOCK
