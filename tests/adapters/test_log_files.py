import gzip
import io

import pytest

from extproc.adapters import log_files
from extproc.adapters.log_files import LogFile
from extproc.core.errors import WarmrouteError

LINES = b"one\ntwo\r\n\nthree"
NUMBERED = [(1, b"one\n"), (2, b"two\r\n"), (3, b"\n"), (4, b"three")]


def test_lines_have_numbers_and_progress(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(LINES)
    log = LogFile(str(path))
    assert (log.size, log.position) == (len(LINES), 0)
    assert list(log.lines()) == NUMBERED
    assert log.position == len(LINES)
    assert log.problems == []


def test_gzip_is_known_by_its_beginning_whatever_its_name(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(gzip.compress(LINES[:8]) + gzip.compress(LINES[8:]))
    log = LogFile(str(path))
    assert list(log.lines()) == NUMBERED


def test_standard_input_may_be_packed_too():
    for data in (LINES, gzip.compress(LINES)):
        log = LogFile("-", io.BytesIO(data))
        assert log.size is None
        assert list(log.lines()) == NUMBERED


def test_a_file_that_breaks_off_is_read_up_to_there(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"line\n" * 10_000)[:-12])
    log = LogFile(str(path))
    assert len(list(log.lines())) > 0
    assert len(log.problems) == 1
    assert "breaks off after line" in log.problems[0]


def test_a_line_without_end_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "LONGEST_LINE", 8)
    path = tmp_path / "a.log"
    path.write_bytes(b"short\n" + b"x" * 30 + b"\nlast\n")
    log = LogFile(str(path))
    assert list(log.lines()) == [(1, b"short\n"), (2, b""), (3, b"last\n")]
    assert f"{path}:2" in log.problems[0]


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(WarmrouteError, match=r"absent\.log"):
        LogFile(str(tmp_path / "absent.log"))


def test_zstd_without_the_package_says_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "a.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 20)

    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(log_files.importlib, "import_module", absent)
    with pytest.raises(WarmrouteError, match="zstd -dc"):
        list(LogFile(str(path)).lines())
