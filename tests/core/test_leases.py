from dataclasses import replace

import pytest

from extproc.core.leases import IDLE, WorkerLoad
from extproc.core.load_ledger import LoadLedger
from tests.support.core import decision


def lease(**fields):
    made = decision("a", **fields)
    return LoadLedger().admit(made, 1, ((1, 2), (3,)), 0.0, 100.0)


def test_what_fills_no_block_is_private_to_a_request():
    made = decision("a", prompt_tokens=100)
    chosen = replace(made.chosen, block_size=16)
    admitted = LoadLedger().admit(replace(made, candidates=(chosen,)), 1, ((1, 2), (3,)), 0.0, 100.0)
    assert admitted.private_prompt_tokens == 100 - 3 * 16
    whole = replace(made, candidates=(replace(made.chosen, block_size=None),))
    assert LoadLedger().admit(whole, 1, (), 0.0, 100.0).private_prompt_tokens == 100


def test_prefill_that_lies_ahead_is_what_is_left_of_the_interval():
    admitted = lease(prefill_ms=200.0)
    assert [admitted.unfinished_prefill_s(now) for now in (-1.0, 0.0, 0.05, 0.3)] == pytest.approx(
        [0.2, 0.2, 0.15, 0.0]
    )
    admitted.first_token_at = 0.05
    assert admitted.unfinished_prefill_s(0.05) == 0.0


def test_the_lease_is_known_by_the_ticket_that_travels_with_the_request():
    assert lease().id == "a"


def test_nothing_is_no_load():
    assert WorkerLoad() == IDLE
    assert not any(IDLE)
