from rich.console import Console

from extproc.cli.simulate_table import knee_lines, results_table


def result(policy, **fields):
    times = {"p50": 1234.5, "p95": 2.0, "p99": None}
    return {
        "policy": policy,
        "ttft_ms": times,
        "tpot_ms": times,
        "rollout_ms": times,
        "output_tok_s": 12.34,
        "cached_token_share": 0.5,
        "decode_blocks_cv": 0.25,
        "failed": 3,
        **fields,
    }


def shown(*results):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(results_table(results))
    return [line.split() for line in capture.get().splitlines()]


def test_a_row_per_result():
    head, row = shown(result("a"))
    assert head[0] == "policy"
    assert row == ["a", "1,234", "2", "-", "1,234", "1.23", "-", "12.3", "50.0%", "0.25", "3"]


def test_the_load_is_a_column_where_there_is_one():
    head, *rows = shown(result("a", concurrency=4), result("a", concurrency=8))
    assert head[1] == "concurrency"
    assert [row[1] for row in rows] == ["4", "8"]


def test_up_to_which_load_a_policy_copes_is_said():
    good, bad = ({"ttft_ms": {"p95": p95}, "failed": 0} for p95 in (900.0, 5000.0))
    ran = [
        *(result("a", rate=rate, **times) for rate, times in ((1.0, good), (2.5, good), (5.0, bad))),
        *(result("b", rate=rate, **bad) for rate in (1.0, 2.5)),
        *(result("c", rate=1.0, routers=routers, **good) for routers in (1, 2)),
    ]
    assert list(knee_lines(ran, 2000.0)) == [
        "a copes up to rate 2.5 (TTFT p95 within 2000 ms, nothing failed)",
        "b copes with none of these loads (TTFT p95 within 2000 ms, nothing failed)",
    ]
