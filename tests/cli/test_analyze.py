import gzip
import io
import json
import shlex
import sys

import pytest

from extproc.cli import main
from extproc.prompt.tiny import tiny_model_path
from tests.support.planted_log import planted_log

LOG = planted_log("identifier")


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"".join(LOG.lines()))
    return path


def analyze(*arguments) -> int:
    return main(["analyze", "--quiet", *map(str, arguments)])


def test_it_prints_and_writes_what_it_found(log, tmp_path, capsys):
    json_file, html_file = tmp_path / "a.json", tmp_path / "a.html"
    assert analyze(log, "--json", json_file, "--html", html_file) == 0
    shown = capsys.readouterr().out
    assert "identifier" in shown
    assert "no --tokenizer was given" in shown
    report = json.loads(json_file.read_text())
    assert report["requests"] == 40
    assert report["breakers"]["found"][0]["kind"] == "identifier"
    assert html_file.read_text().startswith("<!doctype html>")


def test_json_to_standard_output_is_nothing_else(log, capsys):
    assert analyze(log, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 40


def test_the_same_log_gives_the_same_report(log, tmp_path):
    texts = []
    for name in ("a", "b"):
        analyze(log, "--json", tmp_path / name)
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]


def test_several_logs_packed_or_from_standard_input(log, tmp_path, capsys, monkeypatch):
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert analyze(log, packed, "-", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 120
    assert report["logs"] == ["requests.jsonl", "b.jsonl.gz", "-"]


def test_options_reach_the_analysis(log, capsys):
    arguments = "--replicas 3,1 --cache-tokens 320 --block-size 32 --limit 10 --tokenizer"
    assert analyze(log, *shlex.split(arguments), tiny_model_path(), "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert {(row["replicas"], row["cache_tokens"]) for row in report["placement"]} == {
        *((1, 320), (3, 320), (1, None), (3, None))
    }
    assert (report["requests"], report["block_size"]) == (10, 32)


def test_fields_can_be_named(tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text(json.dumps({"who": {"unit": "blue"}, "body": LOG.bodies[0]}))
    assert analyze(path, "--field", "tenant=who.unit", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["groups"]["tenant"][0]["name"] == "blue"


def test_a_configuration_says_how_to_tokenize(log, tmp_path, capsys):
    config = tmp_path / "warmroute.yaml"
    config.write_text(
        f"pools:\n  - name: blue\n    model: {{path: {tiny_model_path()}}}\n"
        '    discovery: {static: ["10.0.0.1:8000"]}\n'
    )
    assert analyze(log, "-c", config, "--json", "-") == 0
    assert "pool blue" in json.loads(capsys.readouterr().out)["tokenizer_note"]
    assert analyze(log, "-c", config, "--pool", "red") == 2
    assert "there are blue" in capsys.readouterr().err


def test_a_log_without_requests_is_exit_code_1(tmp_path, capsys):
    path = tmp_path / "a.log"
    path.write_text("nothing\n{\n")
    assert analyze(path) == 1
    shown = capsys.readouterr().out
    assert "cut off" in shown
    assert "jq -c" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.log"], "absent.log"),
        (["-", "-"], "once only"),
        (["LOG", "--tokenizer", "/absent"], "there is no tokenizer.json"),
        (["LOG", "--field", "colour=x"], "NAME=PATH"),
        (["LOG", "--html", "/absent/x.html"], "cannot write"),
    ],
)
def test_mistakes_are_named(arguments, said, log, capsys):
    assert analyze(*(log if word == "LOG" else word for word in arguments)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--replicas", "0"], ["--cache-tokens", "x"], ["--block-size", "-1"]])
def test_values_out_of_range_are_usage_errors(arguments, log):
    with pytest.raises(SystemExit) as stopped:
        analyze(log, *arguments)
    assert stopped.value.code == 2
