import json

from extproc.sim.policies import POLICIES
from extproc.sim.results import knees, load_name, report_of, result_of
from tests.support.fleet import documents, renamed, simulate

NAMED = ("policy", "ttft_ms", "tpot_ms", "e2e_ms", "rollout_ms", "output_tok_s", "cached_token_share")


def result(policy="round-robin", **load):
    return result_of(policy, simulate(documents(40), POLICIES["round-robin"]), load)


def fake(policy, rate, p95, failed=0):
    return {"policy": policy, "rate": rate, "ttft_ms": {"p95": p95}, "failed": failed}


def test_a_result_has_every_figure_and_is_json():
    made = result(rate=3.0)
    for name in (*NAMED, "decode_blocks_cv", "failed"):
        assert made[name] is not None, name
    assert {"p50", "p95", "p99"} <= set(made["ttft_ms"])
    assert json.loads(json.dumps(made))["rate"] == 3.0
    assert made["cached_token_share"] == round(made["cached_tokens"] / made["prompt_tokens"], 6)
    assert sum(made["requests_by_worker"]) == made["requests"] == 40


def test_figures_without_samples_are_null():
    made = result_of("x", simulate(renamed(documents(3), sessions=[]), POLICIES["round-robin"]), {})
    assert (made["ttft_ms"]["p50"], made["output_tok_s"], made["decode_blocks_cv"]) == (None, None, None)


def test_groups_are_split_only_when_there_are_several():
    assert result()["groups"] == {}
    sessions = list(documents(40).sessions)
    for at, session in enumerate(sessions):
        object.__setattr__(session, "group", "hot" if at % 4 else "cold")
    split = result_of("x", simulate(renamed(documents(0), sessions=sessions), POLICIES["round-robin"]), {})
    assert {name: group["requests"] for name, group in split["groups"].items()} == {"cold": 10, "hot": 30}


def test_the_report_leaves_plots_out():
    report = report_of([result()], {"workload": "w", "replicas": 3, "seed": 0}, 2000.0)
    assert list(report)[:3] == ["workload", "replicas", "seed"]
    assert "plots" not in report["results"][0]
    assert report["knees"] == []


def test_the_knee_is_the_last_load_before_the_first_failure():
    results = [fake("a", 1.0, 10.0), fake("a", 4.0, 100.0), fake("a", 2.0, 3000.0), fake("b", 1.0, 9000.0)]
    results += [
        fake("b", 2.0, 1.0),
        fake("c", 1.0, 10.0),
        fake("c", 2.0, 20.0),
        fake("c", 4.0, 20.0, failed=1),
    ]
    assert knees(results, 2000.0) == [
        {"policy": "a", "rate": 1.0},
        {"policy": "b", "rate": None},
        {"policy": "c", "rate": 2.0},
    ]


def test_the_load_of_a_result():
    assert [load_name(r) for r in ({"rate": 1}, {"concurrency": 2}, {})] == ["rate", "concurrency", None]
