import pytest

from extproc.adapters import index_file
from extproc.adapters.index_file import IndexFileError
from tests.support.full_disk import full_at

PIECES = [b"one", b"two" * 1000, b"\x00" * 10]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "index"
    index_file.write(path, PIECES, 1000.0)
    return path


def test_what_was_written_is_read(file):
    assert list(index_file.read(file, 60.0, 1030.0)) == PIECES
    assert [path.name for path in file.parent.iterdir()] == ["index"]


def test_one_that_does_not_fit_on_the_disk_leaves_the_old_one_and_its_room(file):
    with full_at(1000), pytest.raises(OSError, match="large"):
        index_file.write(file, [bytes(1 << 20)], 2000.0)
    assert list(index_file.read(file, 60.0, 1030.0)) == PIECES
    assert [path.name for path in file.parent.iterdir()] == ["index"]


def test_an_old_one_and_one_of_the_future_are_not_used(file):
    for now in (1061.0, 900.0):
        with pytest.raises(IndexFileError, match="s old"):
            list(index_file.read(file, 60.0, now))


def test_one_that_is_not_there_is_no_error_of_its_own(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(index_file.read(tmp_path / "none", 60.0))
    with pytest.raises(IndexFileError, match="cannot read"):
        list(index_file.read(tmp_path, 60.0))


def test_any_damage_is_found(file):
    good = file.read_bytes()
    for at in range(0, len(good), 7):
        for bad in (good[:at], good[:at] + bytes((good[at] ^ 0x55,)) + good[at + 1 :]):
            file.write_bytes(bad)
            try:
                found = list(index_file.read(file, 1e9, 1030.0))
            except IndexFileError:
                continue
            assert found == PIECES  # only digits of the time can change unseen


def test_a_write_that_fails_leaves_the_old_one(file):
    def broken():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        index_file.write(file, broken(), 1100.0)
    assert list(index_file.read(file, 60.0, 1030.0)) == PIECES
