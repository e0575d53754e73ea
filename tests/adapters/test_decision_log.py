import json
from datetime import UTC, datetime
from random import Random

import pytest

from extproc.adapters.decision_log import open_record, record
from extproc.adapters.decision_writer import DecisionLog
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
    space, _, block = entry["prefix_key"].partition(":")
    assert (len(space), block) == (16, f"{hashes(PROMPT)[5]:016x}")
    assert entry["ttft_ms"] == 31.5
    assert entry["ttft_error"] is None  # the answer was not streamed
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


def test_a_line_says_when_it_was_decided_and_what_was_timed(router):
    released = finish(router, first_body_ms=31.5, upstream_first_body_ms=29.25)
    entry = record(released, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert (entry["decided"], entry["time"]) == (
        "2026-01-02T03:04:04.000+00:00",
        "2026-01-02T03:04:05.000+00:00",
    )
    assert (entry["ttft_ms"], entry["upstream_ttft_ms"], entry["stream"]) == (31.5, 29.25, False)


def test_a_request_that_is_not_over_has_a_line_without_an_end(router):
    decision = router.schedule(request(PROMPT), 1.0)
    lease = router.ledger.get(decision.lease_id)
    entry = open_record(lease, 2.0, datetime(2026, 1, 2, tzinfo=UTC))
    assert entry["outcome"] == "open"
    assert entry["status"] is entry["ttft_ms"] is entry["actual_cached_tokens"] is None
    over = record(router.release(decision.lease_id, Completion(Outcome.FINISHED), 3.0), datetime.now(UTC))
    for name in ("request_id", "selected_worker", "decision", "candidate_workers", "predicted_cached_tokens"):
        assert entry[name] == over[name]


def test_each_candidate_has_its_own_facts(router):
    released = finish(router)
    entry = record(released, datetime.now(UTC))
    for candidate, told in zip(released.lease.decision.candidates, entry["candidate_workers"], strict=True):
        assert told["worker"] == str(candidate.worker)
        facts = entry["facts"]["request"] | told["facts"]["request"]
        assert facts["cached_tokens"] == candidate.priced.request.cached_tokens
        assert facts["uncovered_tokens"] == candidate.priced.request.uncovered_tokens
    assert len({told["facts"]["request"]["cached_tokens"] for told in entry["candidate_workers"]}) == 2
