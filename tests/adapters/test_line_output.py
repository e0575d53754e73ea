import io
import os

import pytest

from extproc.adapters.line_output import LineOutput


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "w") as writer:
        yield reader, writer


def lines(count, size=1000):
    return [b"%06d " % n + b"x" * size + b"\n" for n in range(count)]


def read(reader):
    return b"".join(iter(lambda: reader.read(1 << 16) or b"", b""))


def test_what_a_full_pipe_has_no_room_for_comes_when_it_has(pipe):
    reader, writer = pipe
    output, wanted = LineOutput(lambda: writer), lines(300)
    for line in wanted:
        output.write(line)  # more than a pipe holds, and nobody reads
    got = read(reader)
    assert len(got) < sum(map(len, wanted))
    last = b"last\n"
    while not got.endswith(last):
        output.write(last)
        got += read(reader)
    assert got.splitlines(keepends=True)[:300] == wanted


def test_beyond_the_bound_whole_lines_are_lost_and_told_of(pipe):
    reader, writer = pipe
    output, lost, sent = LineOutput(lambda: writer, most_waiting=50_000), 0, lines(300)
    for line in sent:
        try:
            output.write(line)
        except BlockingIOError:
            lost += 1
    assert 0 < lost < 300
    got = b""
    while not got.endswith(b"end\n"):
        got += read(reader)
        output.write(b"end\n")
        got += read(reader)
    assert [line for line in got.splitlines(keepends=True) if line != b"end\n"] == sent[: 300 - lost]


def test_a_disk_that_is_full_is_told_of_each_time():
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        output = LineOutput(lambda: full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                output.write(b"line\n")


def test_a_reader_that_is_gone_is_told_of(pipe):
    reader, writer = pipe
    output = LineOutput(lambda: writer)
    reader.close()
    with pytest.raises(BrokenPipeError):
        output.write(b"line\n")


def test_a_line_that_was_torn_does_not_spoil_the_next(tmp_path, monkeypatch):
    with (tmp_path / "log").open("w") as file:
        output = LineOutput(lambda: file)
        room = [3, 0]

        def write(descriptor, data):
            if not room:
                return os.write(descriptor, data)
            size = room.pop(0)
            if not size:
                raise OSError(28, "No space left on device")
            return os.write(descriptor, data[:size])

        monkeypatch.setattr("extproc.adapters.line_output.write_now", write)
        with pytest.raises(OSError, match="No space"):
            output.write(b"first\n")
        output.write(b"second\n")
        output.write(b"third\n")
    assert (tmp_path / "log").read_bytes() == b"fir\nsecond\nthird\n"


def test_a_stream_that_is_no_file_is_written_to():
    class NoFile(io.StringIO):
        def fileno(self):
            raise io.UnsupportedOperation

    stream = NoFile()
    LineOutput(lambda: stream).write(b"line\n")
    assert stream.getvalue() == "line\n"


def test_what_was_kept_is_written_without_another_line(pipe):
    reader, writer = pipe
    output, wanted = LineOutput(lambda: writer), lines(300)
    for line in wanted:
        output.write(line)
    got = read(reader)
    assert output.flush() > 0  # more than fits at once
    while len(got) < sum(map(len, wanted)):
        got += read(reader)
        left = output.flush(0.01)
    assert got == b"".join(wanted)
    assert left == output.flush() == 0
