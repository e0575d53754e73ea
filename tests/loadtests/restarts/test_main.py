import json
import sys
from dataclasses import replace

import pytest

from loadtests.restarts import __main__ as command
from loadtests.restarts.evaluate import Noise
from loadtests.restarts.report import Report

QUIET = Report(Noise(1.0, 1.0, enough=True), (), (), 10, 0)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (QUIET, 0),
        (replace(QUIET, failed=1), 1),
        (replace(QUIET, noise=Noise(10.0, 6.0, enough=False)), 2),
        (replace(QUIET, noise=Noise(10.0, 6.0, enough=False), failed=1), 1),
    ],
)
def test_exit_codes(made, code):
    assert command.exit_code(made) == code


def test_options_replace_single_figures():
    args = command.parser().parse_args(
        ["--rate", "5", "--scenarios", "quick", "quick", "--cache-tokens", "9"]
    )
    plan, shape = command.plan_of(args)
    assert (plan.rate, plan.scenarios, plan.rounds) == (5.0, ("quick",), command.FULL_PLAN.rounds)
    assert shape == replace(command.FULL, cache_tokens=9)
    for wrong in (["--rate", "0"], ["--rounds", "0"], ["--steady", "nan"], ["--scenarios", "slow"]):
        with pytest.raises(SystemExit):
            command.parser().parse_args(wrong)


def test_an_engine_holds_a_third_of_the_documents():
    # 1.5 tokens a word, about.
    for shape in (command.FULL, command.QUICK):
        assert 0.2 < shape.cache_tokens / (1.5 * shape.documents * shape.document_words) < 0.7


def test_a_folder_that_is_there_already_is_not_written_to(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["restarts", "--quick", "--keep", str(tmp_path)])
    assert command.main() == 2
    assert str(tmp_path) in capsys.readouterr().err.replace("\n", "")


@pytest.mark.envoy
def test_both_routers_are_restarted_and_no_request_is_lost(monkeypatch, tmp_path, capsys):
    out, markdown, keep = tmp_path / "out.json", tmp_path / "out.md", tmp_path / "kept"
    options = ["--quick", "--scenarios", "quick", "--engines", "2", "--message-timeout", "10"]
    files = ["--json", str(out), "--markdown", str(markdown), "--keep", str(keep)]
    monkeypatch.setattr(sys, "argv", ["restarts", *options, *files])
    command.main()  # how it ends depends on chance, with so few requests
    written = json.loads(out.read_text())
    assert [run["scenario"] for run in written["runs"]] == ["control", "quick"]
    assert written["failures"] == []
    assert written["requests"] > 0
    control, quick = written["runs"]
    assert control["passed_by"] == 0 <= quick["passed_by"] < quick["requests"]
    assert len(quick["down_s"]) == 2
    assert "| quick |" in markdown.read_text()
    assert len(list(keep.glob("router-*-2.log"))) == 2
    assert "second by second" in capsys.readouterr().out
