"""The harness itself: what other tests rely on when they kill and restart real replicas."""

import json
from pathlib import Path

import pytest

from tests.support.engine_ids import engine_ids, request_body
from tests.support.vllm import ReplicaSpec, VllmPool, VllmStartError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def processes_in(directory: Path) -> list[str]:
    """Processes whose working directory is the pool's: its forking process, replicas and engine cores."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == directory:
                found.append(entry.name)
        except OSError:
            continue  # it ended, or is another user's
    return found


def test_a_killed_replica_is_gone_and_comes_back_at_the_same_place(vllm_pool):
    (replica,) = vllm_pool.start(ReplicaSpec(num_gpu_blocks_override=64))
    declared = json.loads(replica.request("GET", "/kv_event_sources")[1])["0"]
    assert declared["endpoint"].endswith(replica.kv_events.rpartition(":")[2])
    assert declared["replay_endpoint"] == replica.kv_replay
    first = replica.pid
    replica.kill()
    assert not replica.healthy()
    replica.restart()
    assert replica.healthy()
    assert replica.pid != first
    replica.kill()


def test_a_replica_that_cannot_start_says_why_and_nothing_is_left(vllm_pool):
    with VllmPool(vllm_pool.python) as pool:
        with pytest.raises(VllmStartError, match="no-such-option"):
            pool.start(ReplicaSpec(), ReplicaSpec(extra_args=("--no-such-option",)))
        directory = pool.directory
        assert processes_in(directory)
    assert not processes_in(directory)
    assert not directory.exists()


def test_a_forked_replica_answers_like_one_started_plainly(vllm_pool, vllm_replicas):
    case = {"messages": [{"role": "user", "content": "Zürich " * 100}]}
    with vllm_pool.plain(ReplicaSpec()) as replica:
        assert engine_ids(replica, "chat", case) == engine_ids(vllm_replicas[0], "chat", case)
        usage = [replica.post("/v1/chat/completions", request_body("chat", case))["usage"] for _ in range(2)]
        assert usage[1]["prompt_tokens_details"]["cached_tokens"] > 0
    assert not replica.healthy()
