import gzip
import io
import json
import sys

import pytest

from extproc.adapters.decision_reader import DecisionLogError, find_decision


def write(path, *entries):
    data = b"".join(json.dumps(entry, ensure_ascii=False).encode() + b"\n" for entry in entries)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def entry(request_id, **fields):
    return {"request_id": request_id, **fields}


def test_the_last_line_about_a_request_is_found(tmp_path):
    path = tmp_path / "log"
    write(path, entry("a", n=1), entry("b", n=2), entry("a", n=3), entry("c", n=4))
    found = find_decision(str(path), "a")
    assert (found.line["n"], found.where, found.lines) == (3, str(path), 2)


def test_rotated_files_are_looked_through_newest_first(tmp_path):
    write(tmp_path / "log", entry("new"))
    write(tmp_path / "log.1", entry("a", n=1))
    write(tmp_path / "log.2.gz", entry("a", n=2), entry("old"))
    write(tmp_path / "log.10", entry("oldest"))
    (tmp_path / "log.bak").write_text("not ours")
    assert find_decision(str(tmp_path / "log"), "a").line["n"] == 1
    assert find_decision(str(tmp_path / "log"), "old").where.endswith("log.2.gz")
    assert find_decision(str(tmp_path / "log"), "oldest") is not None
    assert find_decision(str(tmp_path / "log"), "nobody") is None


def test_an_id_that_is_part_of_another_or_stands_elsewhere_is_not_it(tmp_path):
    path = tmp_path / "log"
    write(path, entry("abc"), entry("x", model="ab"), entry("y"))
    assert find_decision(str(path), "ab") is None


def test_ids_of_any_kind_are_found(tmp_path):
    path = tmp_path / "log"
    names = ['quo"te', "ünï", "back\\slash", "new\nline"]
    write(path, *(entry(name) for name in names))
    for name in names:
        assert find_decision(str(path), name).line["request_id"] == name


def test_torn_lines_are_passed_over(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"request_id": "a", "n": 1}\nnot json "a"\n{"request_id": "a", "n"')
    assert find_decision(str(path), "a").line["n"] == 1


def test_standard_input_can_be_read(monkeypatch):
    data = io.TextIOWrapper(io.BytesIO(b'{"request_id": "a"}\n'))
    monkeypatch.setattr(sys, "stdin", data)
    assert find_decision("-", "a").lines == 1


@pytest.mark.parametrize("name", ["missing", "folder", "broken.gz"])
def test_what_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.gz").write_bytes(b"no gzip at all")
    with pytest.raises(DecisionLogError, match=f"cannot read .*{name}"):
        find_decision(str(tmp_path / name), "a")
