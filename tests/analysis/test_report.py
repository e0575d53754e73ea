import json
from random import Random

import pytest

from extproc.analysis.report import report_of
from tests.analysis.test_analyzer import analyzed, decode
from tests.support.planted_log import planted_log, words

ABOUT = {"logs": ["a.log"], "tokenizer_note": "", "block_size": 16, "problems": []}
LINES = [
    json.dumps({"time": 1000 + at, "tenant": f"t{at % 2}", "body": body}).encode()
    for at, body in enumerate(planted_log("timestamp").bodies)
]


def made(lines=LINES, *, show_text=False, **settings):
    return report_of(analyzed(lines, **settings), decode, ABOUT, show_text=show_text)


def test_it_is_json_and_adds_up():
    report = json.loads(json.dumps(made()))
    assert report["requests"] == 40
    assert report["logs"] == ["a.log"]
    assert sum(report["lengths"]["prompts"]) == sum(report["lengths"]["shared"]) == 40
    assert sum(report["lengths"]["shared_tokens"]) == report["repeated"]["tokens"]
    assert report["repeated"]["share"] == report["repeated"]["tokens"] / report["input_tokens"]
    assert report["time_span_s"] == 39
    [breaker] = report["breakers"]["found"]
    assert breaker["kind"] == "timestamp"
    assert breaker["tokens"] == report["breakers"]["recoverable_tokens"]
    assert breaker["per_request"] * breaker["requests"] == breaker["tokens"]
    assert report["breakers"]["exact"]
    assert report["verdict"]["worth"] == "some"
    assert {row["name"] for row in report["groups"]["tenant"]} == {"t0", "t1"}
    assert report["bounds"]["notes"] == []


def test_no_text_of_prompts_is_in_it_unless_asked_for():
    hidden, shown = json.dumps(made()), json.dumps(made(show_text=True))
    for word in ("Answer", "Current", "time:", "2026-"):
        assert word not in hidden
        assert word in shown


def test_every_size_and_number_of_replicas_has_a_row():
    rows = made(replicas=(1, 3), cache_tokens=(64, 100_000))["placement"]
    assert [(row["replicas"], row["cache_tokens"]) for row in rows] == [
        (replicas, size) for replicas in (1, 3) for size in (64, 100_000, None)
    ]
    assert all(row["random"] <= row["prefix"] + 1e-9 for row in rows if row["cache_tokens"] is None)


def test_the_biggest_shared_beginnings_are_not_each_others_beginnings():
    report = made([planted.replace(b"planted", b"m") for planted in planted_log("none").lines()])
    tokens = [row["tokens"] for row in report["prefixes"]]
    assert report["prefixes"][0]["requests"] >= 8
    assert report["prefixes"][0]["repeated_tokens"] == (report["prefixes"][0]["requests"] - 1) * tokens[0]
    # Rules alone, and rules with each of four documents.
    assert [at > 500 for at in tokens].count(True) == 4
    assert [100 < at < 500 for at in tokens].count(True) == 1


def test_bounds_that_were_reached_are_told():
    bodies = [{"prompt": words(Random(at), 100)} for at in range(60)]
    lines = [json.dumps(body).encode() for body in bodies]
    notes = made(lines, tree_bytes=20_000, anchors=50)["bounds"]["notes"]
    assert len(notes) == 2
    assert "were forgotten, so repeated shares are lower bounds" in notes[0]


def test_estimates_are_said_to_be_such():
    report = made(compared=5)
    assert not report["breakers"]["exact"]
    assert "estimates" in report["bounds"]["notes"][-1]


def test_lines_without_requests_have_reasons_and_places():
    report = made([*LINES, b"{", b"{", b'{"messages": [1]}', b'{"path": "/health"}'])
    lines = report["lines"]
    assert (lines["read"], lines["bad"], lines["not_encoded"], lines["skipped"]) == (44, 2, 1, 1)
    assert lines["bad_reasons"] == [
        {"reason": "not valid JSON (cut off?)", "lines": 2, "examples": ["log:41", "log:42"]}
    ]


@pytest.mark.parametrize("lines", [[], [b"{"]])
def test_a_log_without_requests_gives_a_report_too(lines):
    report = made(lines)
    assert report["verdict"]["worth"] == "unknown"
    assert report["input_tokens"] == 0
