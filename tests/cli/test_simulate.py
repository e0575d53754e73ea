import argparse
import json

import pytest

from extproc.cli import main, simulate
from extproc.core.errors import WarmrouteError

QUICK = (
    "simulate",
    "--quiet",
    "--workload",
    "documents",
    "--limit",
    "30",
    "--policies",
    "round-robin,oracle",
)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulate.configure(parser)
    return parser.parse_args(arguments)


def test_it_prints_a_table_and_writes_json_and_html(tmp_path, capsys):
    json_file, html_file = tmp_path / "a.json", tmp_path / "a.html"
    assert main([*QUICK, "--json", str(json_file), "--html", str(html_file)]) == 0
    report = json.loads(json_file.read_text())
    assert (report["workload"], report["replicas"], report["seed"]) == ("documents", 4, 0)
    assert [result["policy"] for result in report["results"]] == ["round-robin", "oracle"]
    assert all(result["requests"] == 30 for result in report["results"])
    assert report["skipped"] == {}
    page = html_file.read_text()
    assert page.startswith("<!doctype html>")
    assert "--policies round-robin,oracle" in page
    shown = capsys.readouterr().out
    assert "round-robin" in shown
    assert "TTFT p50" in shown
    assert "CV: how unevenly" in shown


def test_figures_on_standard_output_are_alone_there(capsys):
    assert main([*QUICK, "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["workload"] == "documents"
    assert "TTFT p50" in shown.err


def test_a_place_that_does_not_exist_is_said_before_anything_is_simulated(capsys):
    assert main([*QUICK, "--limit", "100000000", "--html", "absent/a.html"]) == 2
    assert "--html absent/a.html: there is no such folder" in capsys.readouterr().err


def test_one_seed_gives_one_json_to_the_byte(tmp_path):
    for name in ("a", "b"):
        assert main([*QUICK, "--kv-loss", "0.1", "--seed", "7", "--json", str(tmp_path / name)]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert main([*QUICK, "--kv-loss", "0.1", "--seed", "8", "--json", str(tmp_path / "c")]) == 0
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_rising_load_gives_a_result_per_policy_and_load(tmp_path):
    assert main([*QUICK, "--rate", "1,50", "--json", str(tmp_path / "a")]) == 0
    report = json.loads((tmp_path / "a").read_text())
    assert [(r["rate"], r["policy"]) for r in report["results"]] == [
        (1.0, "round-robin"),
        (1.0, "oracle"),
        (50.0, "round-robin"),
        (50.0, "oracle"),
    ]
    assert [knee["policy"] for knee in report["knees"]] == ["round-robin", "oracle"]


def test_the_knee_is_searched_and_said(tmp_path, capsys):
    arguments = ("--policies", "round-robin", "--rate", "1", "--knee", "--knee-ttft-ms", "1500")
    assert main([*QUICK, *arguments, "--json", str(tmp_path / "a")]) == 0
    report = json.loads((tmp_path / "a").read_text())
    rates = [result["rate"] for result in report["results"]]
    assert len(rates) > 2
    assert rates == sorted(rates)
    assert report["knees"][0]["rate"] in rates
    assert f"round-robin copes up to rate {report['knees'][0]['rate']:g}" in capsys.readouterr().out


def test_what_there_is_is_listed(capsys):
    assert main(["simulate", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("rl-rollouts", "token-load", "oracle", "llama-8b-a100"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "nothing"), "no workload is called 'nothing'; choose from"),
        (("--policies", "nothing"), "no policy is called 'nothing'; choose from"),
        (("--policies", ","), "names none"),
        (("--preset", "nothing"), "no preset is called 'nothing'; choose from"),
        (("--replicas", "0"), "a fleet has at least 1"),
        (("--knee",), "give --rate or --concurrency"),
        (("--policies", "no.such.module:make"), "no.such.module:make"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises((WarmrouteError, ValueError), match=message):
        simulate.plan(options(*arguments))


def test_a_file_that_cannot_be_written_is_an_error(tmp_path, capsys):
    assert main([*QUICK, "--json", str(tmp_path / "none" / "a.json")]) == 2
    assert "cannot write" in capsys.readouterr().err


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,300,4
2023-11-16 18:15:47.0000000,310,4
2023-11-16 18:15:48.0000000,320,4
2023-11-16 18:15:49.0000000,330,4
"""


def test_a_trace_is_replayed_whole_in_parts_or_in_a_window(tmp_path):
    trace, out = tmp_path / "azure.csv", tmp_path / "out.json"
    trace.write_text(AZURE)
    base = ["simulate", "--quiet", "--workload", "azure-control", "--policies", "round-robin"]

    def requests(*more):
        assert main([*base, "--trace", str(trace), "--json", str(out), *more]) == 0
        return json.loads(out.read_text())["results"][0]["requests"]

    assert requests() == 4
    assert requests("--part", "0/3") == 1
    assert requests("--window", "1:3") == 2
    assert json.loads(out.read_text())["window"] == "1:3"


@pytest.mark.parametrize("choice", [("--part", "0/2"), ("--window", "0:5")])
def test_without_a_trace_there_is_nothing_to_choose_from(choice):
    with pytest.raises(WarmrouteError, match="--trace"):
        simulate.plan(options(*choice))


def test_admission_is_a_policy_with_options(tmp_path, capsys):
    file = tmp_path / "a.json"
    chosen = ("--policies", "token-load,token-load+admission", "--workload", "overload", "--limit", "300")
    hold = ("--priorities", "gold=1", "--admission-wait-s", "2", "--admission-queue-ms", "200")
    assert (
        main(["simulate", "--quiet", *chosen, *hold, "--admission-requests", "50", "--json", str(file)]) == 0
    )
    free, held = json.loads(file.read_text())["results"]
    assert held["failed"] > free["failed"] == 0
    assert held["groups"]["gold"]["failed"] == 0
    assert held["groups"]["quiet"]["ttft_ms"]["p95"] < free["groups"]["quiet"]["ttft_ms"]["p95"]
    assert main(["simulate", *chosen, "--priorities", "gold"]) == 2
    assert "'gold' is not TENANT=NUMBER" in capsys.readouterr().err
