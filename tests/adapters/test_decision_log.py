import json
from random import Random

import pytest

from extproc.adapters.decision_log import DecisionLog
from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.policies import TokenLoad
from extproc.core.router import Router
from extproc.core.types import Completion, Outcome
from tests.support.core import NAMESPACE, hashes, members, request, stored, worker

PROMPT = list(range(1, 200))


@pytest.fixture
def router():
    ids = iter("abcdefgh")
    costs = CostSettings()
    router = Router(
        TokenLoad(costs),
        Random(1),
        new_lease_id=lambda: next(ids),
        pools={"default": PoolFacts(NAMESPACE.model_revision, NAMESPACE.tokenizer_revision)},
    )
    router.on_membership(members(2), 0.0)
    router.on_kv_events(worker(1), [stored(PROMPT[:96])], 0.0)
    return router


def finish(router, **fields):
    decision = router.schedule(request(PROMPT), 1.0)
    return router.release(decision.lease_id, Completion(Outcome.FINISHED, **fields), 2.0)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_tells_the_whole_story(tmp_path, router):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(str(path), on_error=pytest.fail)
    log.write(
        finish(
            router, served_by=worker(1).endpoint, status=200, cached_tokens=96, prompt_tokens=199,
            output_tokens=4, first_body_ms=31.5, duration_ms=80.0, attempts=1,
        )
    )  # fmt: skip
    log.close()
    (entry,) = lines(path)
    assert entry["request_id"] == "r"
    assert entry["selected_worker"] == entry["served_by"] == worker(1).endpoint
    assert entry["predicted_cached_tokens"] == entry["actual_cached_tokens"] == 96
    assert entry["prefill_tokens"] == 103
    assert entry["decision"] == "warm-partial"
    assert entry["prefix_key"] == f"{hashes(PROMPT)[5]:016x}"
    assert entry["ttft_ms"] == 31.5
    assert entry["queue_wait_ms"] == 10.0  # only the step it has to wait for
    assert len(entry["candidate_workers"]) == 2
    for candidate in entry["candidate_workers"]:
        terms = ("queue_ms", "prefill_ms", "decode_ms", "kv_risk_ms")
        assert candidate["total_ms"] == pytest.approx(sum(candidate[t] for t in terms), abs=0.01)


def test_what_was_not_reported_is_null_not_zero(tmp_path, router):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(str(path), on_error=pytest.fail)
    log.write(finish(router))
    log.close()
    (entry,) = lines(path)
    assert entry["actual_cached_tokens"] is None
    assert entry["ttft_ms"] is None


def test_no_prediction_is_claimed_for_a_worker_that_was_no_candidate(tmp_path, router):
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(str(path), on_error=pytest.fail)
    log.write(finish(router, served_by="10.9.9.9:1"))
    log.close()
    assert lines(path)[0]["predicted_cached_tokens"] is None


def test_a_log_that_cannot_be_written_is_said_once_and_harms_nobody(tmp_path, router):
    said = []
    log = DecisionLog(str(tmp_path / "missing" / "x.jsonl"), on_error=said.append)
    for _ in range(3):
        log.write(finish(router))
    log.close()
    assert len(said) == 1
    assert "requests go on" in said[0]
    assert log.failures >= 3


def test_it_recovers_when_the_folder_appears(tmp_path, router):
    folder = tmp_path / "late"
    log = DecisionLog(str(folder / "x.jsonl"), on_error=lambda _: None)
    log.write(finish(router))
    folder.mkdir()
    log.write(finish(router))
    log.close()
    assert len(lines(folder / "x.jsonl")) == 1


def test_an_empty_path_is_off(router):
    log = DecisionLog("", on_error=pytest.fail)
    log.write(finish(router))
    log.close()
