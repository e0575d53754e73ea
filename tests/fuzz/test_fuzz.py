"""Every target with a few examples; with many where `WARMROUTE_FUZZ_SECONDS` says how long for each."""

import os
import time

import hypothesis
import pytest

from tests.fuzz.targets import TARGETS

EXAMPLES = 60
ROUND = 500


def run(name: str, examples: int, seed: int | None = None) -> None:
    target = TARGETS[name]
    with target.check() as check:

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(target.strategy)
        def one(value: object) -> None:
            check(value)

        (one if seed is None else hypothesis.seed(seed)(one))()


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_is_not_promised_happens(name: str) -> None:
    run(name, EXAMPLES)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", TARGETS)
def test_nor_in_as_many_seconds_as_are_given(name: str) -> None:
    end = time.monotonic() + float(os.environ.get("WARMROUTE_FUZZ_SECONDS", "0"))
    seed = 0
    while time.monotonic() < end:
        seed += 1
        run(name, ROUND, seed)
