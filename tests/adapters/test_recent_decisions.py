import json

from extproc.adapters.recent_decisions import Ending, RecentDecisions


def add(recent, request_id, *, key=None, worker="a:1", **fields):
    entry = {"request_id": request_id, "prefix_key": key, "selected_worker": worker, **fields}
    recent.add(request_id, entry, json.dumps(entry).encode())


def test_lines_are_found_by_request_and_newest_first():
    recent = RecentDecisions()
    for name in "abc":
        add(recent, name)
    assert recent.find("b")["request_id"] == "b"
    assert recent.find("z") is None
    assert [line["request_id"] for line in recent.latest(2)] == ["c", "b"]


def test_of_two_requests_with_one_id_the_last_is_found_while_it_is_kept():
    recent = RecentDecisions(max_lines=2)
    add(recent, "same", worker="first:1")
    add(recent, "same", worker="second:1")
    assert recent.find("same")["selected_worker"] == "second:1"
    add(recent, "other")
    assert recent.find("same")["selected_worker"] == "second:1"
    add(recent, "another")
    assert recent.find("same") is None


def test_it_is_bounded_in_number_and_in_bytes():
    recent = RecentDecisions(max_lines=3)
    for number in range(10):
        add(recent, str(number))
    assert [line["request_id"] for line in recent.latest(99)] == ["9", "8", "7"]
    heavy = RecentDecisions(max_bytes=1000)
    for number in range(10):
        add(heavy, str(number), details="x" * 300)
    assert len(heavy) == 2
    assert heavy.find("0") is None
    assert heavy.find("9") is not None


def test_the_hottest_prefixes_are_those_that_save_most_and_come_again():
    recent = RecentDecisions()
    add(recent, "1", key="big", worker="a:1", prompt_tokens=100, actual_cached_tokens=0)
    add(recent, "2", key="big", worker="b:1", prompt_tokens=100, actual_cached_tokens=90)
    add(recent, "3", key="big", worker="b:1", prompt_tokens=100, predicted_cached_tokens=90)
    add(recent, "4", key="once", prompt_tokens=100, actual_cached_tokens=99)
    add(recent, "5", key="small", prompt_tokens=100, actual_cached_tokens=16)
    add(recent, "6", key="small", prompt_tokens=100, actual_cached_tokens=16)
    add(recent, "7")
    hot = recent.hottest(5)
    assert [(p.prefix_key, p.requests, p.cached_tokens, p.prompt_tokens) for p in hot] == [
        ("big", 3, 180, 300), ("small", 2, 32, 200),
    ]  # fmt: skip
    assert list(hot[0].workers.items()) == [("b:1", 2), ("a:1", 1)]
    assert [p.prefix_key for p in recent.hottest(1)] == ["big"]


def test_lists_get_a_short_form_and_a_question_the_whole_line():
    recent = RecentDecisions()
    workers = [{"worker": f"w{n}", "total_ms": n, "facts": {"bulk": "x" * 500}} for n in range(300)]
    add(
        recent,
        "1",
        candidate_workers=workers,
        facts={"bulk": "x" * 500},
        decision="cold-idle",
        outcome="finished",
    )
    (short,) = recent.latest(5)
    assert short["candidates"] == 300
    assert short["candidate_workers"] == [{"worker": f"w{n}", "total_ms": n} for n in range(4)]
    assert "facts" not in short
    assert recent.find("1")["candidate_workers"] == workers
    assert recent.endings(5) == [Ending("cold-idle", None, "finished")]


def test_what_was_never_decided_about_can_be_found_and_is_in_no_list():
    recent = RecentDecisions()
    recent.add_unserved("held", b'{"request_id": "held", "outcome": "expired"}')
    assert recent.find("held") == {"request_id": "held", "outcome": "expired"}
    assert list(recent.latest(10)) == recent.endings(10) == recent.hottest(10) == []
    assert len(recent) == 1
