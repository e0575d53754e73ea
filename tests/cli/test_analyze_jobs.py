import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from extproc.adapters.log_files import LogFile
from extproc.cli.analyze_jobs import default_jobs, read_logs, spec_of
from extproc.config import parse
from extproc.core.errors import WarmrouteError
from extproc.prompt.tiny import tiny_model_path
from tests.support.planted_log import planted_log


def write(path, lines) -> LogFile:
    path.write_bytes(b"".join(lines))
    return LogFile(str(path))


def results(logs, jobs):
    told = []
    found = list(
        read_logs(logs, spec_of(None, None, None), {}, jobs, lambda log, lines: told.append((log, lines)))
    )
    assert sum(lines for _, lines in told) == len(found)
    return [(log.name, result) for log, result in found]


def test_processes_give_the_same_in_the_same_order(tmp_path):
    lines = planted_log("timestamp").lines()
    logs = [write(tmp_path / "a.log", lines[:30]), write(tmp_path / "b.log", [*lines[30:], b"{bad\n"])]
    alone, together = results(logs, 1), results(logs, 2)
    assert alone == together
    assert [result.number for _, result in alone] == [*range(1, 31), *range(1, 12)]
    assert alone[-1][1].bad is not None


def test_small_logs_are_read_in_this_process(tmp_path):
    assert default_jobs([write(tmp_path / "a.log", [b"x\n"])]) == 1
    assert default_jobs([LogFile("-")]) >= 1


def test_without_a_tokenizer_the_tiny_one_stands_in():
    spec = spec_of(None, None, None)
    assert spec.stand_in
    assert "no --tokenizer" in spec.note
    tokens = (123).to_bytes(4, "little") * 3
    assert isinstance(spec.decoder()(tokens), str)


def test_a_tokenizer_is_a_folder_or_its_file(tmp_path):
    folder = str(tiny_model_path())
    assert spec_of(folder, None, None).model_dir == spec_of(folder + "/tokenizer.json", None, None).model_dir
    with pytest.raises(WarmrouteError, match=r"tokenizer\.json"):
        spec_of(str(tmp_path), None, None)


def test_a_model_without_a_chat_template_gets_one_and_says_so(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((tiny_model_path() / "tokenizer.json").read_bytes())
    spec = spec_of(str(tmp_path), None, None)
    assert "ChatML stands in" in spec.note
    [line] = results_of(spec, {"messages": [{"role": "user", "content": "hi"}]}, tmp_path)
    assert line.prompts


def results_of(spec, body, tmp_path):
    log = write(tmp_path / "x.log", [json.dumps(body).encode()])
    return [result for _, result in read_logs([log], spec, {}, 1, lambda *_: None)]


def test_a_pool_of_a_configuration_says_how(tmp_path):
    text = f"""
pools:
  - name: blue
    model: {{path: {tiny_model_path()}, template_kwargs: {{enable_thinking: false}}, fast_tokenizer: "off"}}
    discovery: {{static: ["10.0.0.1:8000"]}}
"""
    [pool] = parse(text, tmp_path).pools
    spec = spec_of(None, None, pool)
    assert (spec.model_dir, spec.fast) == (tiny_model_path(), "off")
    assert dict(spec.template_kwargs) == {"enable_thinking": False}
    assert "pool blue" in spec.note


def test_processes_end_with_a_parent_that_is_killed():
    command = [sys.executable, "-m", "extproc", "analyze", "-", "--jobs", "2", "--quiet"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet) as parent:
        assert parent.stdin is not None
        for line in planted_log("none").lines() * 60:  # enough for a batch for each
            parent.stdin.write(line)
        parent.stdin.flush()
        waited(lambda: len(children(parent.pid)) >= 3, "a tracker and two processes")
        workers = children(parent.pid)
        parent.kill()
        waited(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers), "their end")


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def waited(condition, what: str) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)
