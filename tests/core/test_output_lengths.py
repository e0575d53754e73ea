from dataclasses import replace
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.decode_clock import LONGEST
from extproc.core.output_lengths import ENOUGH, HIGH, MAX_KEYS, MEMORY_S, WINDOW, OutputLengths, Recent
from extproc.core.types import LengthSource
from tests.support.core import request

PLAIN = request(max_output=None)


def asking(**fields):
    return replace(PLAIN, **fields)


def taught(lengths, ask, tokens, now=0.0, times=ENOUGH):
    for _ in range(times):
        lengths.observe(ask, tokens, now)
    return lengths


def test_the_prior_answers_until_there_are_enough_samples():
    lengths = OutputLengths(128.0)
    taught(lengths, PLAIN, 900, times=ENOUGH - 1)
    assert lengths.estimate(PLAIN, 0.0).expected == 128.0
    assert lengths.estimate(PLAIN, 0.0).source is LengthSource.PRIOR
    taught(lengths, PLAIN, 900, times=1)
    assert lengths.estimate(PLAIN, 0.0) == (900.0, 900.0, LengthSource.MODEL)
    assert lengths.estimate(asking(model="other"), 0.0).expected == 128.0


def test_the_most_specific_level_with_enough_samples_answers():
    lengths = OutputLengths(128.0)
    taught(lengths, asking(tenant="a", prompt_class="report"), 2000)
    taught(lengths, asking(tenant="a", prompt_class="label"), 10)
    taught(lengths, asking(tenant="b"), 300, times=3 * ENOUGH)

    def of(**fields):
        estimate = lengths.estimate(asking(**fields), 0.0)
        return estimate.expected, estimate.source

    assert of(tenant="a", prompt_class="report") == (2000.0, LengthSource.CLASS)
    assert of(tenant="a", prompt_class="label") == (10.0, LengthSource.CLASS)
    assert of(tenant="a", prompt_class="new")[1] is LengthSource.TENANT
    assert of(tenant="b", prompt_class="report") == (300.0, LengthSource.TENANT)
    assert of(tenant="c") == (300.0, LengthSource.MODEL)
    assert of(model="other", tenant="a")[1] is LengthSource.PRIOR


def test_a_class_of_one_tenant_says_nothing_about_anothers():
    lengths = taught(OutputLengths(128.0), asking(tenant="a", prompt_class="x", model="m"), 700)
    other = lengths.estimate(asking(tenant="b", prompt_class="x", model="m"), 0.0)
    assert other.source is LengthSource.MODEL


def test_what_is_old_is_forgotten_and_a_coarser_level_answers():
    lengths = OutputLengths(128.0)
    taught(lengths, asking(tenant="a"), 50)
    taught(lengths, asking(tenant="b"), 800, now=MEMORY_S)
    assert lengths.estimate(asking(tenant="a"), MEMORY_S).expected == 50.0
    late = lengths.estimate(asking(tenant="a"), MEMORY_S + 1.0)
    assert (late.expected, late.source) == (800.0, LengthSource.MODEL)
    assert lengths.estimate(asking(tenant="a"), 3 * MEMORY_S).source is LengthSource.PRIOR


def test_newer_samples_push_out_older_ones():
    lengths = taught(OutputLengths(128.0), PLAIN, 50, times=WINDOW)
    taught(lengths, PLAIN, 400, times=WINDOW // 2 + 1)
    assert lengths.estimate(PLAIN, 0.0).expected == 400.0


def test_stragglers_show_in_the_high_estimate_only():
    lengths = OutputLengths(128.0)
    for n in range(50):
        lengths.observe(PLAIN, 8000 if n % 5 == 0 else 1000, 0.0)
    assert lengths.estimate(PLAIN, 0.0)[:2] == (1000.0, 8000.0)


def test_the_requests_own_limit_caps_and_its_hint_overrides():
    lengths = taught(OutputLengths(128.0), PLAIN, 900)
    assert lengths.estimate(asking(max_output_tokens=50), 0.0)[:2] == (50.0, 50.0)
    hinted = lengths.estimate(asking(expected_output_tokens=4000), 0.0)
    assert hinted == (4000.0, 4000.0, LengthSource.HINT)
    assert lengths.estimate(asking(expected_output_tokens=4000, max_output_tokens=60), 0.0).expected == 60.0


@pytest.mark.parametrize("limit", [None, (1 << 31) - 1])
def test_a_hint_counts_up_to_a_bound(limit):
    asked = asking(expected_output_tokens=(1 << 31) - 1, max_output_tokens=limit)
    assert OutputLengths(128.0).estimate(asked, 0.0) == (LONGEST, LONGEST, LengthSource.HINT)


def test_answers_cut_at_small_limits_do_not_make_the_rest_look_short():
    lengths = taught(OutputLengths(128.0), PLAIN, 900, times=WINDOW)
    taught(lengths, asking(max_output_tokens=16), 16, times=WINDOW)
    assert lengths.estimate(PLAIN, 0.0).expected == 900.0
    # Where all are cut late, the cut is the best that is known.
    taught(lengths, asking(max_output_tokens=3000), 3000, times=WINDOW)
    assert lengths.estimate(PLAIN, 0.0).expected == 3000.0


def test_memory_is_bounded_and_the_longest_silent_goes_first():
    lengths = taught(OutputLengths(1.0), asking(tenant="kept"), 5)
    for n in range(2 * MAX_KEYS):
        lengths.observe(asking(tenant=f"t{n}"), 5, 0.0)
        lengths.observe(asking(tenant="kept"), 5, 0.0)
    assert len(lengths) == MAX_KEYS
    assert lengths.estimate(asking(tenant="kept"), 0.0).source is LengthSource.TENANT


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), min_size=1, max_size=150))
def test_quantiles_are_those_of_the_samples_that_are_kept(samples):
    recent, now, kept = Recent(size=40, memory_s=20.0), 0.0, []
    for value, pause in samples:
        now += pause
        recent.add(value, now)
        kept.append((now, value))
    kept = [value for at, value in kept[-40:] if now - at <= 20.0]
    assert recent.count(now) == len(kept)
    assert recent.quantile(0.0) == min(kept)
    assert recent.quantile(1.0) == max(kept)
    if len(kept) > 1:
        assert recent.quantile(0.5) <= quantiles(kept, n=2, method="inclusive")[0]


@given(
    st.lists(st.integers(1, 10_000), max_size=60),
    st.none() | st.integers(1, 3000),
    st.none() | st.integers(1, 20_000),
)
def test_an_estimate_never_exceeds_the_limit_and_the_median_not_the_high(samples, limit, hint):
    lengths = OutputLengths(128.0)
    for sample in samples:
        lengths.observe(PLAIN, sample, 0.0)
    estimate = lengths.estimate(asking(max_output_tokens=limit, expected_output_tokens=hint), 0.0)
    assert 0 < estimate.expected <= estimate.high
    if limit is not None:
        assert estimate.high <= limit


def test_a_quantile_of_nothing_is_an_error():
    with pytest.raises(IndexError):
        Recent().quantile(HIGH)
