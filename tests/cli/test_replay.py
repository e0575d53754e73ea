import dataclasses
import json
import os
import subprocess
import sys

import pytest
import yaml

from extproc.adapters.journal_file import JournalWriter
from extproc.cli import main, replay
from extproc.core.cost import CostSettings
from extproc.core.router import RouterSettings
from tests.support.recorded import HEADER, Traffic


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "journal"
    writer = JournalWriter(path, HEADER, 10**9, 1)
    writer.open()
    Traffic(entries=_Into(writer)).run(600)
    writer.close()
    return path


class _Into(list):
    def __init__(self, writer):
        super().__init__()
        self.writer = writer

    def append(self, entry):
        self.writer.write(entry)


def run(journal, *arguments):
    return main(["replay", str(journal), *arguments])


def test_every_decision_is_reproduced_and_it_is_said(journal, capsys):
    assert run(journal) == 0
    out = capsys.readouterr().out
    assert "decisions reproduced exactly (100 %)" in out
    assert "What if" not in out


def test_another_policy_is_compared(journal, capsys):
    assert run(journal, "--policy", "least-load", "--show", "3") == 0
    out = capsys.readouterr().out
    assert "What if: policy = least-load" in out
    for word in (
        "other worker chosen",
        "tokens predicted cached",
        "predicted TTFT, ms, p95",
        "largest differences",
    ):
        assert word in out


def test_as_json_the_figures_agree_with_each_other(journal, capsys):
    assert run(journal, "--policy", "least-load", "--json", "--show", "5") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] == found["requests"] >= 600
    other = found["what_if"]
    assert other["settings"] == {"policy": "least-load"}
    assert 0 < other["changed"] < other["compared"] <= found["requests"]
    assert sum(one["decisions"] for one in other["reasons"]) == other["changed"]
    assert other["what_if"]["cached_tokens"] < other["as_recorded"]["cached_tokens"]
    assert len(other["largest"]) == 5


def test_the_same_settings_change_nothing(journal, capsys):
    assert run(journal, "--set", f"tie_ms={HEADER.costs.tie_ms}", "--json") == 0
    other = json.loads(capsys.readouterr().out)["what_if"]
    assert (other["settings"], other["changed"]) == ({}, 0)
    assert other["as_recorded"] == other["what_if"]


def test_settings_can_be_changed_one_by_one(journal, capsys):
    assert run(journal, "--set", "cost.max_extra_ttft_ms=0", "--set", "failure_limit=9", "--json") == 0
    other = json.loads(capsys.readouterr().out)["what_if"]
    assert other["settings"] == {"max_extra_ttft_ms": 0.0, "failure_limit": 9}
    assert {one["what_if"] for one in other["reasons"]} >= {"warm-denied-wait"}


def test_a_configuration_can_be_tried(journal, tmp_path, capsys):
    file = tmp_path / "other.yaml"
    pools = [{"discovery": {"static": ["127.0.0.1:1"]}}]
    file.write_text(yaml.safe_dump({"pools": pools, "policy": "round-robin", "cost": {"tie_ms": 7}}))
    assert run(journal, "-c", str(file), "--json") == 0
    settings = json.loads(capsys.readouterr().out)["what_if"]["settings"]
    assert settings["policy"] == "round-robin"
    assert settings["tie_ms"] == 7.0


@pytest.mark.parametrize("text", ["nothing=1", "tie_ms", "tie_ms=soon", "tie_ms=[1", "=1"])
def test_a_setting_that_is_none_is_refused_with_the_names(journal, text, capsys):
    assert run(journal, "--set", text) == 2
    assert text.partition("=")[0] in capsys.readouterr().err


def test_a_drift_is_exit_1_and_named(journal, tmp_path, capsys):
    path = tmp_path / "journal"
    writer = JournalWriter(path, HEADER.changed(seed=8, version="0.9"), 10**9, 1)
    writer.open()
    Traffic(entries=_Into(writer)).run(200)
    writer.close()
    assert run(path) == 1
    out = capsys.readouterr().out
    assert "100 %" not in out
    assert "written by Warmroute 0.9" in out


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_with_another_order_of_sets_reproduces_it_too(journal, hash_seed):
    done = subprocess.run(
        [sys.executable, "-m", "extproc", "replay", str(journal), "--json"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=False,
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["exact"]) == (0, found["requests"])


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("decode_weight=-1", "greater than or equal to 0"),
        ("cost.cold_share=1", "less than 1"),
        ("prefill_tokens_per_s=0", "greater than 0"),
        ("long_max_warm_wait_ms=-1", "greater than or equal to 0"),
        ("tie_ms=.nan", "greater than or equal to 0"),
        ("failure_limit=0", "greater than or equal to 1"),
        ("max_index_blocks=-1", "greater than or equal to 0"),
        ("unreachable_s=-1", "greater than 0"),
        ("peer_fade_after_s=6", "less than `peer_gone_after_s`"),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused_with_the_bound_before_the_replay(
    journal, text, bound, capsys, monkeypatch
):
    monkeypatch.setattr(replay, "Replay", lambda *_: pytest.fail("it must not begin"))
    assert run(journal, "--set", text) == 2
    err = capsys.readouterr().err
    assert text.partition("=")[0].removeprefix("cost.") in err
    assert bound in err


def test_bounds_are_those_of_all_settings_together(journal, capsys):
    both = [
        "--set",
        "peer_fade_after_s=7",
        "--set",
        "peer_gone_after_s=20",
        "--set",
        "long_max_warm_wait_ms=null",
    ]
    assert run(journal, *both, "--json") == 0
    assert json.loads(capsys.readouterr().out)["what_if"]["settings"]["peer_fade_after_s"] == 7.0


def test_every_setting_has_bounds():
    fields = {field.name for kind in (CostSettings, RouterSettings) for field in dataclasses.fields(kind)}
    assert set(replay._BOUNDED) == fields


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_empty_journal_has_nothing_to_compare(tmp_path, capsys, options):
    writer = JournalWriter(tmp_path / "journal", HEADER, 10**9, 1)
    writer.open()
    writer.close()
    assert run(tmp_path / "journal", *options) == 1
    said = capsys.readouterr()
    assert "No request is in it" in (said.err if options else said.out)
    assert not options or json.loads(said.out)["requests"] == 0


def test_what_is_no_journal_is_exit_2(tmp_path, capsys):
    (tmp_path / "text").write_text("hello")
    assert run(tmp_path / "text") == 2
    assert "no Warmroute journal" in capsys.readouterr().err
