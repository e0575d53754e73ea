import json

import msgspec
import pytest

from extproc.adapters.holding import Ending, HeldState, Wait
from extproc.core.types import Outcome
from tests.support.core import members, request, worker
from tests.support.watched import Watched


@pytest.fixture
async def watched(tmp_path):
    async with Watched(tmp_path) as one:
        yield one


async def test_the_state_can_be_written_as_json(watched):
    watched.ask("one")
    assert msgspec.json.decode(msgspec.json.encode(watched.board.state()))["policy"] == "token-load"


async def test_it_shows_load_cache_trust_and_rates_of_every_worker(watched):
    watched.warm(1, range(1, 161))
    watched.route("running", range(1, 161))
    state = watched.board.state()
    assert (state["open_requests"], state["ready"], state["shadow"]) == (1, True, ["least-load"])
    _, one, _ = state["workers"]
    assert one["worker"] == worker(1).endpoint
    assert one["load"]["requests"] == 1
    assert one["load"]["context_tokens"] == 160
    assert one["cache"]["blocks"] == 10
    assert one["cache"]["capacity_blocks"] == 2000
    assert one["cache"]["block_size"] == 16
    assert one["cache"]["events_complete"]
    assert one["engine"] == {"running": 0, "waiting": 0, "kv_usage": 0.25}
    assert one["trust"] == {"confidence": 1.0, "audits": 0, "complaint": None}
    assert one["rates"]["prefill_tokens_per_s"] == pytest.approx(8000.0)


async def test_what_is_not_known_is_null(tmp_path):
    async with Watched(tmp_path, workers=0) as watched:
        watched.router.on_membership(members(1), 0.0)
        (one,) = watched.board.state()["workers"]
    assert one["metrics_age_s"] is one["others"] is one["cache"]["capacity_blocks"] is None
    assert one["engine"] == {"running": None, "waiting": None, "kv_usage": None}


async def test_decisions_are_the_lines_of_the_log_newest_first_without_their_bulk(watched):
    for name in "abc":
        watched.ask(name)
    shown = watched.board.state()["decisions"]
    assert [line["request_id"] for line in shown] == ["c", "b", "a"]
    for line, written in zip(shown, reversed(watched.lines()), strict=True):
        for name in set(line) - {"candidate_workers", "candidates"}:
            assert line[name] == written[name], name
        assert line["candidates"] == 3
        for candidate, whole in zip(line["candidate_workers"], written["candidate_workers"], strict=True):
            assert candidate.items() <= whole.items()
    assert len(json.dumps(shown[0])) < len(json.dumps(watched.lines()[-1]))


async def test_hot_prefixes_are_shown_by_their_key(watched):
    watched.warm(0, range(1, 385))
    for number in range(4):
        watched.ask(str(number))
    (hot,) = watched.board.state()["prefixes"]
    assert hot["prefix_key"] == watched.lines()[-1]["prefix_key"]
    assert hot["requests"] == 4
    assert sum(hot["workers"].values()) == 4


async def test_the_line_of_a_request_is_that_of_the_log_or_an_open_one(watched):
    decision = watched.route("r")
    opened = watched.board.line("r")
    assert opened["outcome"] == "open"
    watched.end(decision, Outcome.CANCELLED)
    assert watched.board.line("r") == watched.lines()[-1]
    assert watched.board.line("nobody") is None
    assert watched.board.explained("nobody") is None


async def test_hidden_fields_are_hidden_in_open_lines_too(tmp_path):
    async with Watched(tmp_path, redact=("request_id",)) as watched:
        watched.route("r")
        assert watched.board.line("r")["request_id"] == "[redacted]"


async def test_warnings_are_part_of_it(watched):
    for _ in range(3):
        watched.router.on_scrape_failure(worker(2).endpoint)
    watched.scrape_errors[worker(2).endpoint] = "/metrics answered 500"
    state = watched.board.state()
    (one,) = state["warnings"]
    assert (one["severity"], one["subject"], state["warnings_total"]) == ("bad", worker(2).endpoint, 1)
    assert "answered 500" in one["cause"]


async def test_a_whole_fleet_in_trouble_is_not_listed_one_by_one(tmp_path):
    async with Watched(tmp_path, workers=0) as watched:
        watched.router.on_membership(members(100), watched.clock())
        state = watched.board.state()
        assert len(state["warnings"]) == 30
        assert state["warnings_total"] >= 100


def held(requests=2):
    full = {str(worker(0)): "queue", str(worker(1)): None}
    return HeldState("default", requests, 900, {("acme", 1): requests}, full, 2.25, 1.25)


async def test_what_is_held_is_shown_with_what_fills_the_workers(watched):
    assert watched.board.state()["held"] == []
    watched.board.held = lambda: [held()]
    state = watched.board.state()
    assert state["held"] == [
        {
            "pool": "default",
            "requests": 2,
            "bytes": 900,
            "oldest_s": 1.2,
            "wait_s": 2.2,
            "waiting": [{"tenant": "acme", "priority": 1, "requests": 2}],
            "full_workers": {str(worker(0)): "queue"},
        }
    ]
    (warning,) = [one for one in state["warnings"] if "held" in one["text"]]
    assert warning["text"] == "2 requests are held, the oldest for 1.2 s"
    assert "queue" in warning["cause"]
    watched.board.held = lambda: [held(0)]
    assert not any("held" in one["text"] for one in watched.board.state()["warnings"])


async def test_a_request_that_was_held_in_vain_can_be_asked_about(watched):
    asked = request(request_id="vain", prompt_tokens=100)
    watched.log.write_unserved(Wait(asked, Ending.EXPIRED, 5000.0, 1))
    explained = watched.board.explained("vain")
    assert explained["decision"]["status"] == 429
    assert "It was held for 5,000.0 ms" in explained["text"]
    assert watched.board.state()["decisions"] == []


def test_what_the_index_keeps_is_told(watched):
    assert watched.board.state()["index"] == {"entries": 0, "limit": 0, "given_up": 0, "recalled_workers": 0}
