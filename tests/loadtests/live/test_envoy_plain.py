import json

import pytest

from extproc.adapters.child_process import ChildError
from extproc.adapters.envoy_process import EnvoyProcess
from loadtests.live.envoy_plain import proxy, trivial_engine
from loadtests.live.fleet import Engine, Fleet, trivial_answers
from loadtests.live.http1 import Pool, encode
from loadtests.live.load import open_loop, request_bytes
from loadtests.live.peers import RUST_ROUTERS
from loadtests.live.targets import (
    DIRECT,
    ENVOY,
    TRIVIAL,
    WARMROUTE,
    Target,
    complete_workers,
    running,
    warmroute_config,
)
from tests.support.envoy import require_envoy
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until


def test_a_plain_proxy_names_every_engine_and_nothing_of_ours():
    config = proxy(["127.0.0.1:1", "127.0.0.1:2"], lb_policy="LEAST_REQUEST")
    text = json.dumps(config)
    (cluster,) = config["static_resources"]["clusters"]
    assert cluster["lb_policy"] == "LEAST_REQUEST"
    assert len(cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]) == 2
    assert "ext_proc" not in text
    with_processor = proxy(["127.0.0.1:1"], processor="127.0.0.1:3")
    assert [c["name"] for c in with_processor["static_resources"]["clusters"]] == ["engines", "processor"]
    assert '"failure_mode_allow": false' in json.dumps(with_processor)


def test_warmroute_is_configured_as_a_user_would(tmp_path):
    engines = (Engine("127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3", ""),)
    config = warmroute_config(WARMROUTE, Fleet("simulated", engines, 16), tmp_path / "d")
    (pool,) = config["pools"]
    assert config["policy"] == "token-load"
    assert pool["discovery"]["static"] == [
        {
            "endpoint": "127.0.0.1:1",
            "kv_events": "tcp://127.0.0.1:2",
            "kv_replay": "tcp://127.0.0.1:3",
        }
    ]
    without = (Engine("127.0.0.1:1", None, None, ""),)
    (pool,) = warmroute_config(WARMROUTE, Fleet("trivial", without, 16), tmp_path / "d")["pools"]
    assert pool["kv_events"] == {"enabled": False}
    assert pool["discovery"]["static"] == [{"endpoint": "127.0.0.1:1"}]


def test_a_router_has_caught_up_when_the_last_word_on_every_worker_is_complete():
    log = """warmroute: KV events of 127.0.0.1:1/0: not complete (connecting)
warmroute: KV events of 127.0.0.1:2/0: complete (replayed)
warmroute: KV events of 127.0.0.1:1/0: complete (replayed)
warmroute: KV events of 127.0.0.1:2/0: not complete (gap)
"""
    assert complete_workers(log) == {"127.0.0.1:1/0"}
    assert complete_workers("") == set()


@pytest.mark.envoy
@pytest.mark.timeout(120)
async def test_warmroute_is_settled_when_it_knows_the_engines_are_empty(tmp_path):
    require_envoy()
    async with SimEngine() as engine:
        fleet = Fleet("simulated", (Engine(engine.endpoint, engine.kv_events, engine.kv_replay, ""),), 16)
        async with running(WARMROUTE, fleet, tmp_path, None) as one:
            await fleet.reset()
            await one.settled()
            log = next(tmp_path.glob("envoy-warmroute-*/router.log")).read_text()
            assert len(complete_workers(log)) == 1


@pytest.mark.envoy
@pytest.mark.timeout(120)
async def test_every_target_of_ours_answers_through_real_envoys(tmp_path):
    require_envoy()
    folder = tmp_path / "engine"
    folder.mkdir()
    async with EnvoyProcess(trivial_engine(trivial_answers()), folder) as upstream:
        fleet = Fleet("trivial", (Engine(upstream.address, None, None, ""),), 16)
        async with Pool(upstream.address) as pool:
            answer = await pool.request(encode("GET", "/v1/models", upstream.address))
            assert json.loads(answer.body)["data"][0]["id"] == "tiny"
        body = json.dumps(
            {"model": "tiny", "messages": [{"role": "user", "content": "x" * 200_000}], "max_tokens": 1}
        ).encode()
        for target in (DIRECT, ENVOY, TRIVIAL, WARMROUTE):
            async with running(target, fleet, tmp_path, None) as one:
                requests = [request_bytes(one.address, body)] * 3
                measured = await open_loop(one.address, requests, [0.0, 0.01, 0.02])
                assert (len(measured.times_ms), measured.failed) == (3, 0), target
                if one.decisions is not None:
                    log = one.decisions
                    await until(lambda log=log: len(log.read_text().splitlines()) == 3)


@pytest.mark.envoy
async def test_a_processor_that_is_gone_fails_requests(tmp_path):
    """So that what is measured as `trivial` was really asked."""
    require_envoy()
    async with EnvoyProcess(trivial_engine({"": "{}"}), _folder(tmp_path, "engine")) as upstream:
        config = proxy([upstream.address], processor="127.0.0.1:9")
        async with EnvoyProcess(config, _folder(tmp_path, "proxy")) as envoy, Pool(envoy.address) as pool:
            assert (await pool.request(encode("POST", "/x", envoy.address, b"{}"))).status == 500


async def test_a_router_that_is_not_installed_is_a_reason(tmp_path):
    fleet = Fleet("trivial", (Engine("127.0.0.1:9", None, None, ""),), 16)
    target = Target("smg", "rust", "cache_aware", RUST_ROUTERS[2])
    with pytest.raises(ChildError, match="pip install"):
        async with running(target, fleet, tmp_path, None):
            pass


def _folder(path, name):
    (path / name).mkdir()
    return path / name
