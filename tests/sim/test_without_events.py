"""Engines that publish no KV events: the router's own record finds almost as many hits as events do."""

from dataclasses import replace
from random import Random

import pytest

from extproc.sim.fleet import Fleet, FleetSettings
from extproc.sim.hardware import ENGINE_PRESETS
from extproc.sim.hosted_router import OURS
from extproc.sim.sessions import Session, Turn, Workload, WorkloadOptions
from extproc.sim.workloads.documents import documents
from extproc.sim.workloads.history import History, key_of
from tests.support.fleet import cached_share

BLOCK = 16
REPLICAS = 4


def chats(count=120, turns=6, concurrency=24):
    """Chats with one system prompt, growing turn by turn; the next question comes after some seconds."""
    rng = Random(3)
    sessions = []
    for chat in range(count):
        history = History(BLOCK, key_of("system"))
        history.extend(key_of("system"), 300)
        asked = []
        for turn in range(turns):
            history.extend(key_of(chat, turn, "user"), rng.randint(50, 400))
            prompt, answer = history.tokens, rng.randint(50, 300)
            history.extend(key_of(chat, turn, "answer"), answer)
            asked.append(Turn(prompt, answer, history.blocks[:], think_s=rng.uniform(1, 8)))
        sessions.append(Session(f"chat {chat}", asked))
    return Workload("chats", BLOCK, sessions, concurrency=concurrency)


def some_documents():
    return documents(WorkloadOptions(seed=1), document_tokens=5000, questions=400, concurrency=8)


WORKLOADS = {"documents": (some_documents, 2600), "chats": (chats, 1200)}  # blocks: about a third of it all


def share(workload, policy, *, events):
    make, blocks = WORKLOADS[workload]
    engine = replace(
        ENGINE_PRESETS["medium"].engine(BLOCK), num_gpu_blocks=blocks, max_model_len=(blocks - 1) * BLOCK
    )
    settings = FleetSettings(replicas=REPLICAS, engine=engine, kv_events=events)
    return cached_share(Fleet(make(), OURS[policy], settings).run())


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", ["prefix-affinity", "token-load"])
def test_nine_tenths_of_the_hits_that_events_give(workload, policy):
    with_events = share(workload, policy, events=True)
    assert with_events > 0.6  # there is something to be found,
    assert with_events > 1.5 * share(workload, "least-load", events=True)  # and looking for it pays
    assert share(workload, policy, events=False) >= 0.9 * with_events
