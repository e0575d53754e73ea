import contextlib

import pytest

from loadtests.live.beside import QUICK_BESIDE, Slice, beside, cells, rows
from loadtests.live.fleet import start_trivial
from loadtests.live.targets import DIRECT


def test_what_big_ones_add_is_the_median_of_the_rounds_differences():
    slices = [Slice([1.0], [3.0], 4, 0), Slice([2.0], [2.5], 6, 1), Slice([5.0], [6.0], 8, 0)]
    (row,) = rows({"ours": slices}, 2.0)
    assert (row.p99_ms, row.beside_p99_ms, row.added_p99_ms, row.big_per_s) == (2.0, 3.0, 1.0, 3.0)
    assert (row.requests, row.failed) == (6, 1)
    assert cells(row)[5:] == ["+1.0", "3.0", "1 of 6"]


@pytest.mark.envoy
async def test_big_ones_are_under_way_while_small_ones_are_timed(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        fleet = await start_trivial(stack, tmp_path, 1)
        slices = await beside(fleet, [DIRECT], QUICK_BESIDE, tmp_path, lambda _text: None)
    (one,) = slices[DIRECT.name]
    assert one.failed == 0
    assert one.big >= 1
    assert len(one.without_ms) == len(one.beside_ms)
