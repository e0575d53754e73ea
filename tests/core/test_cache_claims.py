import pytest

from extproc.core.cache_claims import CacheClaims
from extproc.core.candidates import PoolFacts
from extproc.core.load_ledger import LoadLedger
from extproc.core.outcomes import Released
from extproc.core.types import AllBlocksCleared, BlockRemoved, Completion, Member, Outcome
from extproc.core.worker_table import WorkerTable
from tests.core.test_router import DONE, PROMPT, make_router
from tests.support.core import BLOCK, decision, hashes, metrics, request, stored, worker


def claims_of(*members, **facts):
    """Claims of these workers of one pool, all in the index, and the table of their states."""
    table = WorkerTable()
    table.update(members or (Member(worker(0).endpoint),), 0.0)
    claims = CacheClaims(table, {"default": PoolFacts("model", "tokenizer", BLOCK, **facts)})
    for state in table.all():
        claims.add(state, claims.revision_of(state))
    return claims, table.all()[0]


def test_a_worker_publishes_from_its_first_event_on_until_it_is_silent():
    claims, state = claims_of()
    assert not claims.publishes(state)
    claims.on_events(state.id, [stored(PROMPT)], 1.0)
    assert claims.publishes(state)
    state.kv_silent = True
    assert not claims.publishes(state)
    claims.on_events(state.id, [], 2.0)
    assert claims.publishes(state)


@pytest.mark.parametrize(
    ("configured", "told", "learn", "expected"),
    [
        ("mine", "told", True, "mine"),
        ("mine", None, False, "mine"),
        (None, "told", True, "told"),
        (None, None, True, None),
        (None, "told", False, "model"),
    ],
)
def test_the_revision_of_a_worker(configured, told, learn, expected):
    claims, state = claims_of(Member(worker(0).endpoint, revision=configured), learn_revision=learn)
    state.revision = told
    assert claims.revision_of(state) == expected
    assert claims.learns_revision(state) == (learn and configured is None)


def test_a_worker_of_a_pool_nobody_described_is_known_all_the_same():
    claims, state = claims_of(Member(worker(0).endpoint, pool="other"))
    assert claims.revision_of(state) == ""
    claims.on_events(state.id, [stored(PROMPT)], 1.0)
    assert claims.index.resident_blocks(state.id) > 0


def test_another_revision_forgets_the_blocks_of_the_one_before():
    claims, state = claims_of()
    claims.on_events(state.id, [stored(PROMPT)], 1.0)
    claims.on_trust(state.id, "messages 5 to 9 are lost", trusted=False)
    claims.renew(state, "newer")
    assert (state.revision, claims.index.resident_blocks(state.id)) == ("newer", 0)
    assert state.id not in claims.doubts
    claims.on_events(state.id, [stored(PROMPT)], 2.0)
    assert claims.index.match(hashes(PROMPT)) == []  # these are blocks of the newer one now


@pytest.mark.parametrize("publishes", [True, False])
def test_a_restart_is_a_gap_only_in_events_that_there_are(publishes):
    claims, state = claims_of()
    if publishes:
        claims.on_events(state.id, [stored(PROMPT)], 1.0)
    claims.on_trust(state.id, "complete", trusted=True)
    claims.on_restart(state)
    assert claims.index.resident_blocks(state.id) == 0
    assert state.kv_trusted != publishes
    assert ("restarted" in state.kv_cause) == publishes


def test_a_restart_of_an_engine_of_which_nothing_was_claimed_explains_nothing():
    claims, state = claims_of()
    claims.on_events(state.id, [stored(PROMPT)], 1.0)
    claims.on_reset(state.id)
    claims.on_trust(state.id, "no message seen yet", trusted=False)
    claims.on_restart(state)
    assert (state.kv_trusted, state.kv_cause) == (False, "no message seen yet")


def test_the_same_bad_news_again_changes_nothing_and_other_news_does():
    claims, state = claims_of()
    claims.on_events(state.id, [stored(PROMPT)], 1.0)
    claims.on_trust(state.id, "lost", trusted=False)
    doubted = claims.doubts.blocks(state.id)
    assert doubted == len(PROMPT) // BLOCK
    other = range(5000, 5000 + 2 * BLOCK)
    claims.on_events(state.id, [stored(other, first_handle=700)], 2.0)
    claims.on_trust(state.id, "lost", trusted=False)
    assert claims.doubts.blocks(state.id) == doubted
    claims.on_trust(state.id, "lost again", trusted=False)
    assert claims.doubts.blocks(state.id) == doubted + 2


def test_news_of_a_worker_that_left_is_ignored():
    claims, state = claims_of()
    gone = worker(7)
    claims.on_trust(gone, "lost", trusted=False)
    claims.on_suspended(gone, suspended=True)
    assert gone not in claims.doubts
    assert (state.kv_cause, state.kv_suspended) == ("no KV events yet", False)


@pytest.mark.parametrize(
    ("fields", "completion", "audited"),
    [
        ({}, {"cached_tokens": 0}, True),
        ({}, {}, False),
        ({"sequences": 2}, {"cached_tokens": 0}, False),
        ({}, {"cached_tokens": 0, "served_by": worker(3).endpoint}, False),
    ],
)
def test_only_what_can_be_compared_is_audited(fields, completion, audited):
    claims, state = claims_of()
    made = decision("a", prompt_tokens=len(PROMPT), **fields)
    made.request.prompts = request(PROMPT).prompts
    lease = LoadLedger().admit(made, state.generation, (tuple(hashes(PROMPT)),), 0.0, 1e9)
    claims.audit(Released(lease, Completion(Outcome.FINISHED, **completion), 1.0))
    assert claims.trust.belief(state.id, 1.0).audits == int(audited)


def test_a_worker_whose_events_stop_is_doubted_and_others_are_not_touched():
    router = make_router(2)
    for n in range(2):
        router.on_kv_events(worker(n), [stored(PROMPT)], 0.5)
        router.on_kv_trust(worker(n), "complete", trusted=True)
    only = frozenset({worker(0).endpoint})
    for n in range(3):  # computes blocks, tells of none
        decision = router.schedule(request(range(n * 9000, n * 9000 + 300), subset=only), 1.0 + n)
        router.release(decision.lease_id, Completion(Outcome.FINISHED, cached_tokens=0), 1.5 + n)
    assert "stopped" in router.table.get(worker(0)).kv_cause
    decision = router.schedule(request(PROMPT), 5.0)
    assert decision.chosen.worker == worker(1)
    silent = decision.candidates[1]
    assert (silent.cached_tokens, silent.doubtful_tokens) == (0, decision.chosen.cached_tokens)
    router.release(decision.lease_id, DONE, 5.5)
    # What it has served since then is remembered, and what is verified is believed again.
    assert router.schedule(request(range(18_000, 18_300), subset=only), 6.0).chosen.cached_tokens > 0
    full = (len(PROMPT) - 1) // BLOCK * BLOCK
    verified = router.schedule(request(PROMPT, subset=only), 6.0)
    router.release(verified.lease_id, Completion(Outcome.FINISHED, cached_tokens=full), 6.5)
    assert router.schedule(request(PROMPT, subset=only), 7.0).chosen.cached_tokens == full


def test_a_worker_whose_events_wait_for_an_answer_has_not_fallen_silent():
    router = make_router(1)
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.5)
    router.on_kv_trust(worker(0), "messages 5 to 9 are missing", trusted=False)
    for n in range(6):  # computes blocks; what it tells of them is held back
        decision = router.schedule(request(range(n * 9000, n * 9000 + 300)), 1.0 + n)
        router.on_kv_heard(worker(0), 1.2 + n)
        router.release(decision.lease_id, Completion(Outcome.FINISHED, cached_tokens=0), 1.5 + n)
    state = router.table.get(worker(0))
    assert (state.kv_silent, state.kv_cause) == (False, "messages 5 to 9 are missing")
    for n in range(3):  # now it has
        decision = router.schedule(request(range(n * 7000, n * 7000 + 300)), 11.0 + n)
        router.release(decision.lease_id, Completion(Outcome.FINISHED, cached_tokens=0), 11.5 + n)
    assert state.kv_silent


@pytest.mark.parametrize("complete", [True, False])
def test_events_that_were_late_are_believed_again_if_none_is_missing(complete):
    router = make_router(1)
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.5)
    router.on_kv_trust(worker(0), "as told", trusted=complete)
    for n in range(3):
        decision = router.schedule(request(range(n * 9000, n * 9000 + 300)), 1.0 + n)
        router.release(decision.lease_id, Completion(Outcome.FINISHED, cached_tokens=0), 1.5 + n)
    state = router.table.get(worker(0))
    assert (state.kv_silent, state.kv_trusted) == (True, False)
    router.on_kv_events(worker(0), [stored(range(9000, 9300), first_handle=700)], 5.0)
    assert (state.kv_silent, state.kv_trusted, state.kv_cause == "as told") == (False, complete, complete)
    assert (router.schedule(request(PROMPT), 6.0).chosen.doubtful_tokens == 0) == complete


def lose_events(router, n=0):
    """Worker `n` has stored PROMPT, and then some of its events were lost."""
    router.on_kv_events(worker(n), [stored(PROMPT)], 0.5)
    router.on_kv_trust(worker(n), "complete", trusted=True)
    router.on_kv_trust(worker(n), "messages 5 to 9 are lost", trusted=False)


FULL = (len(PROMPT) - 1) // BLOCK * BLOCK


def test_after_lost_events_claims_are_verified_before_they_are_believed():
    router = make_router(1)
    lose_events(router)
    first = router.schedule(request(PROMPT), 1.0)
    assert (first.chosen.cached_tokens, first.chosen.doubtful_tokens) == (0, FULL)
    unknown = router.schedule(request(range(9000, 9000 + len(PROMPT))), 1.0)
    assert first.chosen.cost.prefill_ms < 0.2 * unknown.chosen.cost.prefill_ms  # but they are priced
    router.release(first.lease_id, Completion(Outcome.FINISHED, cached_tokens=FULL), 1.5)
    assert router.schedule(request(PROMPT), 2.0).chosen.cached_tokens == FULL


def test_only_what_is_proven_wrong_is_purged():
    router = make_router(1)
    lose_events(router)
    other = list(range(5000, 5200))
    router.on_kv_events(worker(0), [stored(other, first_handle=700)], 0.6)  # since then: no doubt
    first = router.schedule(request(PROMPT), 1.0)
    router.release(first.lease_id, Completion(Outcome.CANCELLED, cached_tokens=160), 1.5)
    again = router.schedule(request(PROMPT), 2.0).chosen
    assert (again.cached_tokens, again.doubtful_tokens, again.odds) == (160, FULL - 160, 0.0)
    assert router.schedule(request(other), 2.0).chosen.cached_tokens == 192


def test_a_block_that_is_stored_again_is_beyond_doubt_and_counted_once():
    router = make_router(1)
    lose_events(router)
    router.on_kv_events(worker(0), [stored(PROMPT)], 1.0)
    assert router.schedule(request(PROMPT), 2.0).chosen.cached_tokens == FULL
    router.release("lease-0", Completion(Outcome.CANCELLED), 2.1)
    router.on_kv_events(worker(0), [BlockRemoved(tuple(range(1, 21)))], 3.0)
    gone = router.schedule(request(PROMPT), 4.0).chosen
    assert (gone.cached_tokens, gone.doubtful_tokens) == (0, 0)


def test_doubts_end_when_all_events_are_known_again_or_the_cache_is_cleared():
    router = make_router(2)
    for n in range(2):
        lose_events(router, n)
    router.on_kv_trust(worker(0), "complete", trusted=True)
    router.on_kv_events(worker(1), [AllBlocksCleared()], 1.0)
    hits = {
        c.worker: (c.cached_tokens, c.doubtful_tokens)
        for c in router.schedule(request(PROMPT), 2.0).candidates
    }
    assert hits == {worker(0): (FULL, 0), worker(1): (0, 0)}


def test_a_restart_that_only_the_counters_tell_of_empties_the_worker():
    router = make_router(1)
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.5)
    router.on_kv_trust(worker(0), "complete", trusted=True)
    for tokens in (500.0, 3.0):
        router.on_metrics(worker(0).endpoint, {0: metrics(prompt_tokens=tokens)}, 1.0)
    chosen = router.schedule(request(PROMPT), 2.0).chosen
    assert (chosen.cached_tokens, chosen.doubtful_tokens) == (0, 0)
    assert "did not say so" in router.table.get(worker(0)).kv_cause


def test_a_restart_that_events_told_of_costs_nothing_twice():
    router = make_router(1)
    router.on_metrics(worker(0).endpoint, {0: metrics(prompt_tokens=500.0)}, 1.0)
    router.on_kv_reset(worker(0))
    router.on_kv_events(worker(0), [stored(PROMPT)], 1.5)
    router.on_metrics(worker(0).endpoint, {0: metrics(prompt_tokens=3.0)}, 2.0)
    assert router.schedule(request(PROMPT), 2.5).chosen.cached_tokens == FULL


def test_lost_events_of_one_worker_cost_another_nothing():
    router = make_router(2)
    router.on_kv_events(worker(1), [stored(PROMPT)], 0.5)
    lose_events(router, 0)
    for n in range(6):
        decision = router.schedule(request(PROMPT, subset=frozenset({worker(0).endpoint})), 1.0 + n)
        router.release(decision.lease_id, Completion(Outcome.CANCELLED, cached_tokens=0), 1.5 + n)
    other = next(c for c in router.schedule(request(PROMPT), 9.0).candidates if c.worker == worker(1))
    assert (other.cached_tokens, other.confidence) == (FULL, 1.0)


def test_a_hit_that_keeps_failing_is_priced_lower_but_still_reported():
    router = make_router(2)
    router.on_kv_events(worker(0), [stored(PROMPT)], 0.0)
    router.on_kv_trust(worker(0), "complete", trusted=True)
    before = next(c for c in router.schedule(request(PROMPT), 0.5).candidates if c.worker == worker(0))
    for n in range(6):
        decision = router.schedule(request(PROMPT, subset=frozenset({worker(0).endpoint})), 1.0 + n)
        router.on_kv_events(
            worker(0), [stored(range(n * 777, n * 777 + 20), first_handle=10_000 + n)], 1.2 + n
        )
        router.release(decision.lease_id, Completion(Outcome.FINISHED, cached_tokens=0), 1.5 + n)
    after = next(c for c in router.schedule(request(PROMPT), 9.0).candidates if c.worker == worker(0))
    assert after.cached_tokens == before.cached_tokens
    assert after.confidence == 0.0
    assert after.cost.prefill_ms > before.cost.prefill_ms


def test_what_is_said_after_a_restart_counts_though_the_connection_was_lost_before():
    claims, state = claims_of()
    claims.on_events(state.id, [stored(PROMPT)], 1.0)
    claims.on_suspended(state.id, suspended=True)
    claims.on_restart(state)
    assert not state.kv_suspended  # whoever suspended it may never be heard again
    assert not state.kv_trusted
    assert "restarted" in state.kv_cause


def test_a_copy_too_many_is_gone_once_a_request_has_missed_it():
    """Each request that misses the block computes it, so the next one finds it: never two fail in a row."""
    router, told = make_router(1), stored(PROMPT)
    router.on_kv_events(worker(0), (told, told), 1.0)  # one removal in between was never told
    gone = BlockRemoved(told.block_hashes[::-1])
    claimed = []
    for now in (2.0, 4.0, 6.0, 8.0):
        router.on_kv_events(worker(0), (gone,), now)
        asked = router.schedule(request(PROMPT), now)
        claimed.append(asked.chosen.cached_tokens > 0)
        router.on_kv_events(worker(0), (told,), now + 0.1)
        for found in (0, asked.chosen.block_size * len(told.block_hashes)):
            router.release(asked.lease_id, Completion(Outcome.FINISHED, cached_tokens=found), now + 0.2)
            asked = router.schedule(request(PROMPT), now + 0.3)
        router.release(asked.lease_id, Completion(Outcome.CANCELLED), now + 0.4)
    assert claimed == [True, True, False, False]
