import pytest

from extproc.adapters.rotating_file import RotatingFile, rotate
from tests.support.full_disk import full_at


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_it_appends_to_what_is_there(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    file = RotatingFile(path, 0, 1)
    file.write(b"after\n")
    file.close()
    assert path.read_bytes() == b"before\nafter\n"


def test_others_may_not_read_it(tmp_path):
    file = RotatingFile(tmp_path / "log", 0, 1)
    file.close()
    assert (tmp_path / "log").stat().st_mode & 0o007 == 0


def test_no_piece_is_torn_and_the_oldest_go(tmp_path):
    path = tmp_path / "log"
    file = RotatingFile(path, 10, 2)
    for number in range(9):
        file.write(b"%d---" % number)
    file.close()
    assert [path.with_name(name).read_bytes() for name in ("log.2", "log.1", "log")] == [
        b"4---5---", b"6---7---", b"8---",
    ]  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_disk_costs_what_it_has_no_room_for_and_tears_nothing(tmp_path):
    path = tmp_path / "log"
    file = RotatingFile(path, 0, 1)
    with full_at(10):
        file.write(b"first--\n")
        with pytest.raises(OSError, match="large"):
            file.write(b"second-\n")
        assert path.read_bytes() == b"first--\n"
    file.write(b"third--\n")
    file.close()
    assert path.read_bytes() == b"first--\nthird--\n"


def test_a_piece_larger_than_the_limit_is_written_whole(tmp_path):
    file = RotatingFile(tmp_path / "log", 4, 1)
    file.write(b"longer than four")
    file.write(b"next")
    file.close()
    assert (tmp_path / "log.1").read_bytes() == b"longer than four"
    assert (tmp_path / "log").read_bytes() == b"next"


@pytest.mark.parametrize("how", ["moved", "deleted"])
def test_when_someone_else_rotates_it_the_new_file_is_used(tmp_path, how):
    path, clock = tmp_path / "log", Clock()
    file = RotatingFile(path, 0, 1, clock)
    file.write(b"one")
    if how == "moved":
        path.rename(tmp_path / "moved")
    else:
        path.unlink()
    clock.now = 5.0
    file.write(b"two")
    file.close()
    assert path.read_bytes() == b"two"


def test_rotating_leaves_holes_alone(tmp_path):
    path = tmp_path / "log"
    path.write_text("new")
    path.with_name("log.2").write_text("old")
    rotate(path, 3)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"log.1": "new", "log.3": "old"}


def test_after_a_failed_write_it_tries_again(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    clock = Clock()
    file = RotatingFile(folder / "log", 0, 1, clock)
    (folder / "log").unlink()
    folder.rmdir()
    clock.now = 5.0
    with pytest.raises(OSError, match="No such file"):
        file.write(b"lost")
    folder.mkdir()
    file.write(b"kept")
    file.close()
    assert (folder / "log").read_bytes() == b"kept"
