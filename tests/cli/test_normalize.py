import gzip
import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from extproc.cli import main

CHAT = {"messages": [{"role": "user", "content": "Date: 1\nBe kind. \r\nNow."}], "n": 1.50}
CLEAN = {"messages": [{"role": "user", "content": "already clean"}]}
TOOLS = {"messages": [], "tools": [{"function": {"b": 1, "a": 12345678901234567890}, "type": "function"}]}


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(body) for body in (CHAT, CLEAN, TOOLS)) + "\n\n")
    return str(path)


def run(*arguments):
    return main(["normalize", *arguments])


def report(capsys):
    return json.loads(capsys.readouterr().out)


def test_what_would_change_is_counted_and_shown(lines, capsys):
    assert run(lines) == 0
    out = capsys.readouterr().out
    assert "2 of 3 bodies would change" in out
    assert "body 1 (/v1/chat/completions): line-ends 1, trailing-spaces 1" in out
    assert "body 3 (/v1/chat/completions): key-order 1" in out
    assert r"kind. \r\nNow" in out
    assert r"kind.\nNow" in out


def test_gzipped_files_are_read(lines, tmp_path, capsys):
    packed = tmp_path / "requests.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(lines).read_bytes()))
    assert run("--json", str(packed)) == 0
    assert report(capsys)["changed"] == 2


@pytest.mark.parametrize("kept", [20, -5])
def test_a_gzipped_file_that_is_broken_is_named(lines, tmp_path, capsys, kept):
    packed = tmp_path / "requests.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(lines).read_bytes())[:kept])
    assert run(str(packed)) == 2
    assert f"cannot read {packed}: " in capsys.readouterr().err


def test_as_json(lines, capsys):
    assert run("--json", "--show", "0", lines) == 0
    assert report(capsys) == {
        "bodies": 3,
        "changed": 2,
        "rules": {
            "key-order": {"bodies": 1, "changes": 1},
            "line-ends": {"bodies": 1, "changes": 1},
            "trailing-spaces": {"bodies": 1, "changes": 1},
        },
        "not_normalized": {},
    }


def test_normalized_bodies_are_written_and_need_nothing_more(lines, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run("-o", str(out), lines) == 0
    written = out.read_text().splitlines()
    assert written[1] == json.dumps(CLEAN)
    assert written[2] == (
        '{"messages": [], "tools": [{"function": {"a": 12345678901234567890, "b": 1}, "type": "function"}]}'
    )
    capsys.readouterr()
    assert run("--json", str(out)) == 0
    assert report(capsys)["changed"] == 0


def test_standard_input_and_output(monkeypatch, capsysbinary):
    body = json.dumps(CHAT, indent=2).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body)))
    assert run("-o", "-") == 0
    captured = capsysbinary.readouterr()
    assert captured.out == body.replace(rb" \r\nNow", rb"\nNow") + b"\n"
    assert b"1 of 1 bodies would change" in captured.err


def test_the_rules_are_those_of_a_pool(lines, tmp_path, capsys):
    config = tmp_path / "warmroute.yaml"
    pools = [
        {"name": name, "discovery": {"static": ["10.0.0.1:8000"]}, "normalization": rules}
        for name, rules in (
            ("one", {"volatile_lines": ["Date:"], "line_ends": False, "trailing_spaces": False}),
            ("two", {"tool_key_order": False}),
        )
    ]
    config.write_text(yaml.safe_dump({"pools": pools}))
    assert run("--json", "--show", "0", "-c", str(config), lines) == 0
    assert set(report(capsys)["rules"]) == {"volatile-lines", "key-order"}
    assert run("--json", "--show", "0", "-c", str(config), "--pool", "two", lines) == 0
    assert set(report(capsys)["rules"]) == {"line-ends", "trailing-spaces"}
    assert run("-c", str(config), "--pool", "three", lines) == 2
    assert "no pool 'three': one, two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "a \n"}, "/v1/completions"),
        ({"input": "a \n"}, "/v1/responses"),
        ({"system": "a \n", "messages": []}, "/v1/messages"),
        ({"messages": [{"role": "user", "content": "a \n"}]}, "/v1/chat/completions"),
    ],
)
def test_the_endpoint_is_guessed_or_said(tmp_path, capsys, body, path):
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    assert run(str(file)) == 0
    assert f"body 1 ({path}): trailing-spaces 1" in capsys.readouterr().out
    other = "/v1/completions" if path != "/v1/completions" else "/v1/messages"
    assert run("--path", other, str(file)) == 0
    assert "0 of 1 bodies would change" in capsys.readouterr().out


def test_what_cannot_be_read_is_counted_and_passed_on(tmp_path, capsys):
    file, out = tmp_path / "mixed.jsonl", tmp_path / "out.jsonl"
    content = '{"broken\n{"model": "no prompt"}\n[1]\n{"prompt": "a \\n"}\n'
    file.write_text(content)
    assert run("--json", "--show", "0", "-o", str(out), str(file)) == 1
    found = report(capsys)
    assert (found["bodies"], found["changed"]) == (4, 1)
    assert found["not_normalized"] == {"not-json": 1, "unknown-endpoint": 2}
    assert out.read_text() == content.replace(" \\n", "\\n")


def test_too_large_is_no_fault_of_the_file(tmp_path, capsys):
    config = tmp_path / "warmroute.yaml"
    pool = {"discovery": {"static": ["10.0.0.1:8000"]}, "normalization": {"max_body_bytes": 5}}
    config.write_text(yaml.safe_dump({"pools": [pool]}))
    file = tmp_path / "body.json"
    file.write_text(json.dumps(CHAT))
    assert run("-c", str(config), str(file)) == 0
    assert "1 not normalized: too-large" in capsys.readouterr().out


def test_an_empty_file_has_no_bodies(tmp_path, capsys):
    file = tmp_path / "empty"
    file.touch()
    assert run(str(file)) == 0
    assert "0 of 0" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["missing.jsonl"], ["--pool", "x"], ["-o", "/nowhere/out"]])
def test_what_cannot_be_run_says_why(lines, arguments, capsys):
    assert run(*arguments, *([] if arguments[0] == "missing.jsonl" else [lines])) == 2
    assert "warmroute normalize:" in capsys.readouterr().err


def test_an_input_is_never_overwritten(lines, capsys):
    assert run("-o", lines, lines) == 2
    assert "is an input" in capsys.readouterr().err
    assert run(lines) == 0
    assert "2 of 3" in capsys.readouterr().out
