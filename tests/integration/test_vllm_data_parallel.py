"""Real vLLM whose data-parallel ranks are behind several servers, one on each node."""

import asyncio

import pytest

from extproc.adapters.routing_service import DP_RANK_HEADER
from extproc.core.types import WorkerId
from extproc.protocol.ext_proc_messages import Route
from tests.support.ports import free_port
from tests.support.vllm import ReplicaSpec
from tests.support.waiting import until
from tests.test_app import TEXT, Running, settings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

RANKS, LOCAL = 4, 2


def node(start: int, rpc_port: int) -> ReplicaSpec:
    """One node of a deployment with a server on each, which balances among the ranks of its node."""
    return ReplicaSpec(
        num_gpu_blocks_override=128,
        extra_args=(
            *("--data-parallel-size", str(RANKS), "--data-parallel-size-local", str(LOCAL)),
            *("--data-parallel-hybrid-lb", "--data-parallel-start-rank", str(start)),
            *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(rpc_port)),
            *("--api-server-count", "1"),
        ),
    )


async def test_every_rank_of_a_hybrid_deployment_is_seen_and_reached(vllm_pool, tmp_path):
    """Metrics, KV events and ports have a rank's number in the deployment, requests its place in a server."""
    rpc_port = free_port()
    starts = (0, LOCAL)
    replicas = await asyncio.to_thread(vllm_pool.start, *(node(start, rpc_port) for start in starts))
    static = [
        {
            "endpoint": replica.endpoint,
            "dp_start_rank": start,
            "kv_events": replica.kv_events,
            "kv_replay": replica.kv_replay,
        }
        for start, replica in zip(starts, replicas, strict=True)
    ]
    try:
        async with Running(
            settings(tmp_path, pool={"dp_size": LOCAL, "discovery": {"static": static}})
        ) as app:
            states = app.router.table.all()
            assert [state.id.dp_rank for state in states] == [0, 1, 2, 3]
            await until(lambda: all(state.metrics is not None for state in states))
            for replica in replicas:
                refused, _ = await ask(replica, "x", LOCAL)
                assert refused == 400
            before = [state.metrics.prompt_tokens for state in states]
            status, _ = await ask(replicas[1], TEXT, 1)
            assert status == 200
            third = states[3]
            assert third.id == WorkerId(replicas[1].endpoint, 3)
            await until(lambda: third.kv_trusted and app.router.index.resident_blocks(third.id) > 0)
            await until(lambda: third.metrics.prompt_tokens > before[3])
            assert [state.metrics.prompt_tokens for state in states[:3]] == before[:3]
            assert all(app.router.index.resident_blocks(state.id) == 0 for state in states[:3])

            route = await app.ask()
            assert isinstance(route, Route)
            chosen = app.router.ledger.get(route.lease_id).decision.chosen
            assert (chosen.worker, route.set_headers[DP_RANK_HEADER]) == (third.id, "1")
            assert chosen.cached_tokens > 0
            assert app._watch.scrape_errors == {}
    finally:
        for replica in replicas:
            replica.kill()


async def ask(replica, prompt, place):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    return await asyncio.to_thread(
        replica.request, "POST", "/v1/completions", body, {DP_RANK_HEADER: str(place)}
    )
