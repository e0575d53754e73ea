from dataclasses import replace

from extproc.core.types import CostBreakdown, Reason
from extproc.journal.decisions import digest, summary
from tests.support.core import candidate, decision


def test_equal_decisions_have_equal_digests_whatever_their_request():
    assert digest(decision()) == digest(decision())
    assert digest(decision(prompt_tokens=5)) == digest(decision(prompt_tokens=6))


def test_the_last_bit_of_a_price_counts():
    made = decision()
    price = made.chosen.cost.prefill_ms
    other = replace(made.chosen, cost=CostBreakdown(0.0, price * (1 + 2**-52), 0.0, 0.0))
    assert other.cost.prefill_ms != price
    assert digest(replace(made, candidates=(other,))) != digest(made)


def test_order_reason_and_policy_count():
    made = replace(decision(), candidates=(candidate(0), candidate(1)))
    others = (
        replace(made, candidates=made.candidates[::-1]),
        replace(made, reason=Reason.COLD_BUSY),
        replace(made, policy="other"),
        replace(made, tie_seed=1),
    )
    assert len({digest(made), *map(digest, others)}) == 5


def test_a_summary_says_who_and_why():
    assert summary(decision(n=2)) == {
        "lease": "l",
        "worker": ["10.0.0.2:8000", 0],
        "reason": "cold-idle",
        "digest": digest(decision(n=2)),
    }
