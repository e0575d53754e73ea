import pytest

from extproc.core.estimators import OutputLengths, PrefillRates, Window
from tests.support.core import worker


def test_a_window_answers_with_its_prior_until_it_has_enough():
    window = Window(7.0, enough=3)
    window.add(1.0)
    window.add(1.0)
    assert window.value == 7.0
    window.add(1.0)
    assert window.value == 1.0


def test_a_window_shrugs_off_outliers_and_forgets():
    window = Window(0.0, size=5, enough=3)
    for sample in (10.0, 10.0, 1e9, 10.0):
        window.add(sample)
    assert window.value == 10.0
    for _ in range(5):
        window.add(20.0)
    assert window.value == 20.0


def test_equal_workers_share_the_pools_rate_despite_noise():
    rates = PrefillRates(1.0)
    for i in range(20):
        rates.observe(worker(0), 1000, 100.0 + i % 3)
        rates.observe(worker(1), 1000, 104.0 - i % 3)
    assert rates.tokens_per_s(worker(0)) == rates.tokens_per_s(worker(1)) == rates.tokens_per_s(worker(9))


def test_a_clearly_slower_worker_gets_its_own_rate():
    rates = PrefillRates(1.0)
    for _ in range(20):
        rates.observe(worker(0), 1000, 100.0)
        rates.observe(worker(1), 1000, 100.0)
        rates.observe(worker(2), 1000, 400.0)
    assert rates.tokens_per_s(worker(2)) == pytest.approx(2500.0)
    assert rates.tokens_per_s(worker(0)) == pytest.approx(10_000.0)
    rates.forget(worker(2))
    assert rates.tokens_per_s(worker(2)) == pytest.approx(10_000.0)


def test_nonsense_samples_teach_nothing():
    rates = PrefillRates(5.0)
    for _ in range(10):
        rates.observe(worker(0), 0, 10.0)
        rates.observe(worker(0), 10, 0.0)
    assert rates.tokens_per_s(worker(0)) == 5.0


def test_output_lengths_are_learned_per_model_and_capped_by_the_request():
    outputs = OutputLengths(128.0)
    for _ in range(10):
        outputs.observe("long", 900)
    assert outputs.expected("long", None) == 900.0
    assert outputs.expected("long", 50) == 50.0
    assert outputs.expected("other", None) == 128.0


def test_output_lengths_are_bounded_in_memory():
    outputs = OutputLengths(1.0)
    for n in range(5000):
        outputs.observe(f"model-{n}", 5)
    assert len(outputs._models) <= 1024
