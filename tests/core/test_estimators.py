from extproc.core.estimators import ReuseShares, Window


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


def test_reuse_is_the_share_of_prompt_tokens_found_lately():
    reuse = ReuseShares()
    assert reuse.of("a") == 0.0
    for _ in range(50):
        reuse.observe("a", 1000, 250)
        reuse.observe("b", 1000, 0)
    assert reuse.of("a") == 0.25
    assert reuse.of("b") == 0.0
    for _ in range(2000):
        reuse.observe("a", 1000, 900)
    assert 0.89 < reuse.of("a") < 0.91
