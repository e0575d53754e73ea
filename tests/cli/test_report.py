import gzip
import json

import pytest

from extproc.cli import main
from tests.analysis.test_mode_report import line


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "decisions.jsonl"
    lines = [line("observe"), line("enforce", cached=990, ttft=12.0), line("enforce", outcome="failed")]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines) + "no json\n")
    return path


def test_a_table_compares_modes(log, capsys):
    assert main(["report", str(log)]) == 0
    out = capsys.readouterr().out
    assert "observe" in out
    assert "12 / 12 / 12" in out
    assert "left out: 1 requests that did not finish" in out
    assert "left out: 1 lines that are none of a decision log" in out


def test_json_has_every_figure_and_packed_logs_are_read(log, tmp_path, capsys):
    packed = tmp_path / "old.jsonl.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    assert main(["report", "--json", str(log), str(packed)]) == 0
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert modes["enforce"]["warm"]["requests"] == 2


def test_nothing_to_report_is_said(log, capsys):
    assert main(["report", str(log), "--pool", "none"]) == 1
    assert "no finished request" in capsys.readouterr().out


def test_a_log_that_is_missing_is_named(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
