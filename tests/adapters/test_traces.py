import gzip

import pytest

from extproc.adapters.traces import part_of, read_lines, window_of
from extproc.core.errors import WarmrouteError


def test_plain_and_gzipped_files_read_alike(tmp_path):
    plain, packed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.gz"
    plain.write_text("one\ntwo\n")
    packed.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert list(read_lines(plain)) == ["one\n", "two\n"] == list(read_lines(packed))


@pytest.mark.parametrize(
    ("name", "content"), [("absent", None), ("broken.gz", b"not gzip"), ("binary", b"\xff\xfe\xff")]
)
def test_what_cannot_be_read_is_named(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WarmrouteError, match=name):
        list(read_lines(path))


def test_parts_and_windows_are_understood():
    assert part_of("0/3") == (0, 3)
    assert part_of("2/3") == (2, 3)
    assert window_of("0:600") == (0.0, 600.0)
    assert window_of("1.5:2") == (1.5, 2.0)


@pytest.mark.parametrize("text", ["3/3", "1", "-1/3", "a/b", "0/0", ""])
def test_a_part_that_does_not_exist_is_refused(text):
    with pytest.raises(WarmrouteError, match="0/3"):
        part_of(text)


@pytest.mark.parametrize("text", ["5:5", "-1:5", "5", "a:b", "1:2:3"])
def test_an_empty_window_is_refused(text):
    with pytest.raises(WarmrouteError, match="0:600"):
        window_of(text)
