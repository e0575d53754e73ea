import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.restarts.evaluate import Dip, Noise, Period, Sample, Timeline, noise


def series(shares, per_second=10):
    """`shares[i]` of the tokens of every request in second i."""
    return [
        Sample(second + number / per_second, 1000, round(share * 1000))
        for second, share in enumerate(shares)
        for number in range(per_second)
    ]


def test_shares_are_of_tokens_and_not_of_requests():
    timeline = Timeline([Sample(0.5, 3000, 3000), Sample(0.1, 1000, 0), Sample(1.0, 500, 500)])
    assert timeline.share(Period(0.0, 1.0)) == 0.75
    assert timeline.share(Period(1.0, 2.0)) == 1.0
    assert timeline.share(Period(2.0, 3.0)) is None
    assert timeline.by_second(Period(0.0, 2.5)) == [0.75, 1.0, None]
    assert timeline.count(Period(0.0, 1.0)) == 2


def test_a_loss_is_measured_by_depth_time_and_area():
    timeline = Timeline(series([0.9] * 10 + [0.6] * 4 + [0.9] * 10))
    dip = timeline.dip(Period(10.0, 24.0), 0.9, width_s=1.0)
    assert dip.deepest_points == pytest.approx(30.0)
    assert dip.below_s == 4.5  # four seconds, and one window that is half in it
    assert dip.lost_points_s == pytest.approx(120.0)
    assert dip.within


def test_a_wider_window_shows_it_less_deep_and_for_longer():
    timeline = Timeline(series([0.9] * 10 + [0.6] + [0.9] * 10))
    narrow, wide = (timeline.dip(Period(10.0, 21.0), 0.9, width_s) for width_s in (1.0, 4.0))
    assert (narrow.deepest_points, wide.deepest_points) == (pytest.approx(30.0), pytest.approx(7.5))
    assert (narrow.below_s, wide.below_s) == (1.5, 3.5)
    assert narrow.lost_points_s == wide.lost_points_s == pytest.approx(30.0)


def test_what_is_gained_is_no_loss():
    timeline = Timeline(series([0.9] * 5 + [1.0] * 5))
    dip = timeline.dip(Period(6.0, 10.0), 0.9, width_s=1.0)
    assert dip.deepest_points == pytest.approx(-10.0)
    assert (dip.below_s, dip.within) == (0.0, True)
    assert dip.lost_points_s < 0


@pytest.mark.parametrize(
    ("deepest", "below_s", "within"),
    [(4.9, 0.0, True), (50.0, 9.5, True), (5.1, 10.0, False), (50.0, 30.0, False)],
)
def test_deep_for_long_is_too_much(deepest, below_s, within):
    assert Dip(0.9, deepest, below_s, 0.0).within is within


def test_a_long_shallow_loss_is_within_and_is_seen_in_the_area():
    timeline = Timeline(series([0.9] * 10 + [0.87] * 20))
    dip = timeline.dip(Period(10.0, 30.0), 0.9, width_s=2.0)
    assert dip.within
    assert dip.lost_points_s == pytest.approx(60.0)


def test_seconds_without_requests_are_no_loss():
    timeline = Timeline([one for one in series([0.9] * 20) if not 5 <= one.at < 10])
    dip = timeline.dip(Period(4.0, 12.0), 0.9, width_s=1.0)
    assert dip.deepest_points == pytest.approx(0.0)


def test_windows_are_as_wide_as_chance_asks():
    quiet = Timeline(series([0.9] * 40))
    assert noise(quiet, [Period(0.0, 40.0)]) == Noise(1.0, pytest.approx(0.0), enough=True)
    uneven = Timeline(series([0.8, 1.0] * 20))
    found = noise(uneven, [Period(0.0, 40.0)])
    assert (found.width_s, found.enough) == (2.0, True)


def test_the_noisiest_control_decides():
    timeline = Timeline(series([0.9] * 20 + [0.8, 1.0] * 10))
    assert noise(timeline, [Period(0.0, 20.0)]).width_s == 1.0
    assert noise(timeline, [Period(0.0, 20.0), Period(20.0, 40.0)]).width_s == 2.0


def test_a_control_that_drifts_or_is_too_short_proves_nothing():
    drifting = Timeline(series([0.9] * 20 + [0.3] * 20))
    assert not noise(drifting, [Period(0.0, 40.0)]).enough
    quiet = Timeline(series([0.9] * 40))
    assert not noise(quiet, [Period(0.0, 1.5)]).enough
    assert not noise(quiet, []).enough


@given(
    st.lists(st.floats(0.0, 1.0), min_size=2, max_size=30),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.floats(0.0, 1.0),
)
def test_windows_never_go_deeper_than_the_worst_request(shares, width_s, baseline):
    samples = series(shares)
    dip = Timeline(samples).dip(Period(0.0, len(shares)), baseline, width_s)
    worst = max((baseline - one.cached / one.prompt) * 100 for one in samples)
    assert dip.deepest_points <= worst + 1e-9
    assert 0.0 <= dip.below_s <= len(shares)
    assert dip.below_s == 0.0 or dip.deepest_points > 5.0
