import contextlib

import pytest

from loadtests.live.alone import QUICK_ALONE, alone, cells, rows
from loadtests.live.fleet import start_trivial
from loadtests.live.targets import DIRECT, ENVOY

SLICES = {
    ("2 KB", "Envoy"): [[1.0, 1.0, 2.0], [1.0, 1.0, 4.0]],
    ("2 KB", "trivial"): [[2.0, 2.0], [4.0, 4.0]],
    ("2 KB", "ours"): [[4.0, 4.0], [4.0, float("inf")]],
}


def test_what_is_added_is_above_envoy_and_compared_with_the_trivial_processor():
    envoy, trivial, ours = rows(SLICES, "Envoy", "trivial")
    assert (envoy.added_ms, trivial.p50_ms, trivial.added_ms, trivial.ratio) == (0.0, 3.0, 2.0, 1.0)
    assert (ours.p50_ms, ours.added_ms, ours.ratio) == (4.0, 3.0, 1.5)
    assert (ours.requests, ours.failed) == (4, 1)
    assert cells(ours) == ["ours", "4.00", "inf", "+3.00", "1.50", "1 of 4"]


def test_without_something_to_compare_with_nothing_is_said():
    (row,) = rows({("2 KB", "ours"): [[4.0]]}, "Envoy", "trivial")
    assert (row.added_ms, row.ratio) == (None, None)
    assert cells(row)[3:] == ["-", "-", "0"]


@pytest.mark.envoy
async def test_targets_take_turns_and_the_first_round_only_warms_up(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        fleet = await start_trivial(stack, tmp_path, 1)
        slices = await alone(fleet, [DIRECT, ENVOY], QUICK_ALONE, tmp_path, lambda _text: None)
    assert {name for _, name in slices} == {"direct", "Envoy"}
    assert all(len(taken) == QUICK_ALONE.rounds - 1 for taken in slices.values())
    assert all(row.failed == 0 and row.requests for row in rows(slices, ENVOY.name, "none"))
