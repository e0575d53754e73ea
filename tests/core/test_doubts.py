import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.doubts import FAILURES, LIFETIME_S, Doubts
from tests.support.core import worker

W, OTHER = worker(0), worker(1)
CHAIN = [11, 12, 13, 14, 15]


def test_nobody_is_doubted_without_a_reason():
    doubts = Doubts()
    assert W not in doubts
    assert doubts.believed(W, CHAIN, 5, 0, 0.0) == (5, 1.0)


def test_a_claim_counts_up_to_its_first_doubted_block():
    doubts = Doubts()
    doubts.doubt(W, [13, 14], 0.0)
    assert doubts.believed(W, CHAIN, 5, 0, 0.0) == (2, 1.0)
    assert doubts.believed(W, CHAIN, 2, 0, 0.0) == (2, 1.0)
    assert doubts.believed(OTHER, CHAIN, 5, 0, 0.0) == (5, 1.0)


def test_what_was_sent_there_since_is_not_doubted():
    doubts = Doubts()
    doubts.doubt(W, CHAIN, 0.0)
    assert doubts.believed(W, CHAIN, 5, 2, 0.0)[0] == 2


def test_what_a_request_finds_is_verified_and_the_rest_disproved():
    doubts = Doubts()
    doubts.doubt(W, CHAIN, 0.0)
    doubts.audit(W, CHAIN, claimed=4, actual=3, settled=True, now=1.0)
    at, odds = doubts.believed(W, CHAIN, 5, 0, 1.0)
    assert (at, odds) == (3, 0.0)  # 14 is disproved: it is worth nothing
    doubts.stored(W, [14])
    assert doubts.believed(W, CHAIN, 4, 0, 1.0)[0] == 4
    assert doubts.blocks(W) == 1


def test_of_a_worker_without_events_nothing_is_verified_for_good():
    doubts = Doubts()
    doubts.doubt(W, CHAIN, 0.0)
    doubts.audit(W, CHAIN, claimed=5, actual=5, settled=False, now=1.0)
    assert doubts.believed(W, CHAIN, 5, 0, 1.0)[0] == 0


def test_odds_follow_what_was_found():
    doubts = Doubts()
    doubts.doubt(W, range(100), 0.0)
    before = doubts.believed(W, [90], 1, 0, 0.0)[1]
    for block in range(5):
        doubts.audit(W, [block], claimed=1, actual=0, settled=True, now=0.0)
    worse = doubts.believed(W, [90], 1, 0, 0.0)[1]
    for block in range(10, 30):
        doubts.audit(W, [block], claimed=1, actual=1, settled=True, now=0.0)
    assert before == 1.0
    assert worse < 0.4
    assert doubts.believed(W, [90], 1, 0, 0.0)[1] > 0.8


def test_a_doubted_claim_has_a_lifetime():
    doubts = Doubts()
    doubts.doubt(W, [1], 0.0)
    assert doubts.believed(W, [1], 1, 0, LIFETIME_S)[1] == pytest.approx(0.5)
    doubts.doubt(W, [1, 2], LIFETIME_S)  # more is lost: what was in doubt before is no younger
    assert doubts.believed(W, [1], 1, 0, 2 * LIFETIME_S)[1] == pytest.approx(0.25)
    assert doubts.believed(W, [2], 1, 0, 2 * LIFETIME_S)[1] == pytest.approx(0.5)


def test_a_prefix_that_is_not_found_again_and_again_is_doubted_on_that_worker():
    doubts = Doubts()
    for _ in range(FAILURES):
        assert doubts.believed(W, CHAIN, 5, 0, 1.0)[0] == 5
        doubts.audit(W, CHAIN, claimed=5, actual=2, settled=True, now=1.0)
    assert doubts.believed(W, CHAIN, 5, 0, 1.0)[0] == 2
    assert doubts.believed(OTHER, CHAIN, 5, 0, 1.0)[0] == 5
    doubts.audit(W, CHAIN, claimed=2, actual=5, settled=True, now=2.0)
    assert doubts.believed(W, CHAIN, 5, 0, 2.0)[0] == 5
    doubts.stored(W, CHAIN)
    assert W not in doubts


def test_failures_far_apart_or_with_a_success_between_prove_nothing():
    doubts = Doubts()
    doubts.audit(W, CHAIN, claimed=5, actual=2, settled=True, now=0.0)
    doubts.audit(W, CHAIN, claimed=5, actual=5, settled=True, now=1.0)
    doubts.audit(W, CHAIN, claimed=5, actual=2, settled=True, now=2.0)
    doubts.audit(W, CHAIN, claimed=5, actual=2, settled=True, now=3.0 + LIFETIME_S)
    assert doubts.blocks(W) == 0


def test_what_is_no_longer_claimed_is_forgotten():
    doubts = Doubts()
    doubts.doubt(W, [1, 2, 3], 0.0)
    doubts.doubt(W, [3], 1.0)
    assert doubts.blocks(W) == 1
    doubts.clear(W)
    assert W not in doubts


def test_memory_of_failures_is_bounded():
    doubts = Doubts()
    for block in range(5000):
        doubts.audit(W, [block], claimed=1, actual=0, settled=True, now=0.0)
    assert len(doubts._workers[W].failed) <= 1024


@given(
    st.lists(st.integers(0, 12), max_size=12, unique=True),
    st.lists(
        st.tuples(
            st.sampled_from(("doubt", "stored", "audit", "clear")), st.integers(0, 12), st.integers(0, 12)
        ),
        max_size=30,
    ),
)
def test_belief_is_a_leading_part_of_the_claim_at_odds_between_0_and_1(chain, steps):
    doubts = Doubts()
    for now, (step, a, b) in enumerate(steps):
        match step:
            case "doubt":
                doubts.doubt(W, range(a, b), float(now))
            case "stored":
                doubts.stored(W, range(a, b))
            case "audit":
                doubts.audit(
                    W, chain, claimed=min(a, len(chain)), actual=min(b, len(chain)), settled=a % 2 == 0,
                    now=float(now),
                )  # fmt: skip
            case "clear":
                doubts.clear(W)
        at, odds = doubts.believed(W, chain, len(chain), 0, float(now))
        assert 0 <= at <= len(chain)
        assert 0.0 <= odds <= 1.0
        assert all(not doubts.is_doubted(W, block) for block in chain[:at])


def test_what_was_not_found_is_miscounted_until_it_is_stored_again():
    doubts = Doubts()
    doubts.audit(W, CHAIN, claimed=4, actual=2, settled=True, now=1.0)
    assert [doubts.is_unsure(W, block) for block in CHAIN] == [False, False, True, True, False]
    doubts.audit(W, CHAIN, claimed=4, actual=4, settled=True, now=2.0)  # computed meanwhile
    assert doubts.believed(W, CHAIN, 4, 0, 2.0) == (4, 1.0)
    assert doubts.is_unsure(W, 13)
    doubts.stored(W, [13, 14])
    assert W not in doubts


def test_what_is_remembered_of_failures_is_bounded():
    doubts = Doubts()
    chain = list(range(5000))
    doubts.audit(W, chain, claimed=5000, actual=0, settled=True, now=1.0)
    doubts.audit(W, chain[::-1], claimed=5000, actual=0, settled=True, now=1.0)
    assert sum(doubts.is_unsure(W, block) for block in chain) <= 1024 + 1
