import json
import sys

import pytest

from loadtests.decisions import __main__ as command

RUN = command.Run(1.0, 2.0, 3.0, 0.5, 100.0, 0.3, 0.1, 900, 0)


def test_medians_of_figures_and_the_sum_of_failures():
    runs = [RUN, command.Run(3.0, 2.5, 9.0, 0.5, 90.0, 0.5, 0.1, 900, 2), RUN]
    assert command.median(runs) == command.Run(1.0, 2.0, 3.0, 0.5, 100.0, 0.3, 0.1, 900, 2)


@pytest.mark.envoy
@pytest.mark.parametrize("processes", [1, 2])
def test_both_are_asked_the_same_and_nothing_fails(monkeypatch, tmp_path, capsys, processes):
    out = tmp_path / "out.json"
    options = ["--shape", "short", "--rate", "20", "--seconds", "1", "--rounds", "1", "--workers", "3"]
    options += ["--processes", str(processes)]
    monkeypatch.setattr(sys, "argv", ["decisions", *options, "--json", str(out)])
    assert command.main() == 0
    found = json.loads(out.read_text())
    assert set(found) == {"short/Warmroute", "short/trivial processor"}
    for ((run),) in found.values():
        assert run["failed"] == 0
        assert 0.0 < run["p50"] <= run["p95"] <= run["p99"]
    assert "prompts of 200 tokens" in capsys.readouterr().out
