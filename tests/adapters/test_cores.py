import os

import pytest

from extproc.adapters.cores import cores

HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("max 100000\n", HERE),
        ("100000 100000\n", 1),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("99900000 100000\n", HERE),
        ("100000 0\n", HERE),
        ("what\n", HERE),
        ("", HERE),
    ],
)
def test_a_container_may_have_fewer_than_its_machine(tmp_path, text, found):
    (tmp_path / "cpu.max").write_text(text)
    assert cores(tmp_path / "cpu.max") == found


def test_without_a_limit_all_that_it_may_run_on_count(tmp_path):
    assert cores(tmp_path / "none") == HERE
