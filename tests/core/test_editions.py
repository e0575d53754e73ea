"""A rolling update: half the workers on a new revision, and what that does to predictions."""

from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.editions import editions
from extproc.core.hashing import token_array
from extproc.core.namespace import Namespace
from extproc.core.policies import POLICIES
from extproc.core.router import Router
from extproc.core.types import BlockStored, Completion, Member, Outcome, Rendition
from extproc.core.worker_table import WorkerState
from tests.support.core import BLOCK, request, worker

OLD, NEW = "v1", "v2"
NAMESPACE = Namespace(OLD, "tokens-1")
PROMPTS = [tuple(range(base, base + 6 * BLOCK)) for base in (1000, 5000, 9000)]


def router_of(workers, *, learn=False, tokenizers=None):
    ids = count()
    costs = CostSettings(prefill_tokens_per_s=1000.0)
    facts = PoolFacts(
        OLD,
        "tokens-1",
        BLOCK,
        learn_revision=learn,
        tokenizer_revisions={} if tokenizers is None else tokenizers,
    )
    router = Router(
        POLICIES["token-load"](costs),
        Random(1),
        new_lease_id=lambda: f"l{next(ids)}",
        pools={"default": facts},
        costs=costs,
    )
    router.on_membership(workers, 0.0)
    return router


def member(number, revision):
    return Member(worker(number).endpoint, revision=revision)


class Engines:
    """What each worker's engine really holds, and the events it sends: new processes begin empty."""

    def __init__(self, router):
        self.router = router
        self.held = {}
        self.handles = count(1)

    def serve(self, who, tokens):
        self.held.setdefault(who, set()).add(tokens)
        hashes = tuple(next(self.handles) for _ in range(len(tokens) // BLOCK))
        self.router.on_kv_events(who, [BlockStored(hashes, None, tokens, BLOCK)], 1.0)

    def restart(self, who):
        self.held.pop(who, None)
        self.router.on_kv_reset(who)


def ask_of(tokens, renditions=None):
    return request(tokens, namespace=NAMESPACE, renditions=renditions or {})


step = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(0, 0)),
    st.tuples(st.just("update"), st.integers(0, 3), st.sampled_from([0, 1])),
)


@settings(max_examples=60)
@given(st.lists(step, min_size=5, max_size=40))
def test_no_request_is_ever_predicted_warm_on_the_wrong_revision(steps):
    """Workers move from one revision to the other at any time; their engines restart, empty."""
    revisions = [OLD, OLD, NEW, NEW]
    router = router_of([member(n, revision) for n, revision in enumerate(revisions)])
    engines = Engines(router)
    for kind, number, to in steps:
        if kind == "update":
            revisions[number] = (OLD, NEW)[to]
            before = router.table.get(worker(number)).revision
            change, _ = router.on_membership([member(n, r) for n, r in enumerate(revisions)], 1.0)
            assert (worker(number) in change.reseeded) == (before != revisions[number])
            if before != revisions[number]:
                engines.restart(worker(number))
            continue
        tokens = PROMPTS[number]
        decision = router.schedule(ask_of((*tokens, 7)), 1.0)
        for candidate in decision.candidates:
            held = tokens in engines.held.get(candidate.worker, ())
            assert candidate.cached_tokens == (len(tokens) if held else 0)
        chosen = decision.chosen.worker
        expected = revisions[[worker(n) for n in range(4)].index(chosen)]
        assert decision.request.namespace.model_revision == expected
        engines.serve(chosen, tokens)
        router.release(decision.lease_id, Completion(Outcome.FINISHED), 1.0)
    assert len(router.ledger) == 0
    assert router.index.stats().reservations == 0


def test_equal_blocks_of_two_revisions_are_not_one():
    router = router_of([member(0, OLD), member(1, NEW)])
    engines = Engines(router)
    engines.serve(worker(1), PROMPTS[0])
    decision = router.schedule(ask_of((*PROMPTS[0], 7)), 1.0)
    assert {c.worker: c.cached_tokens for c in decision.candidates} == {worker(0): 0, worker(1): 6 * BLOCK}
    engines.serve(worker(0), PROMPTS[1])
    decision = router.schedule(ask_of((*PROMPTS[1], 7)), 1.0)
    assert {c.worker: c.cached_tokens for c in decision.candidates} == {worker(0): 6 * BLOCK, worker(1): 0}


def test_a_revision_with_another_tokenizer_is_looked_up_with_its_own_ids():
    router = router_of([member(0, OLD), member(1, NEW)], tokenizers={NEW: "tokens-2"})
    engines = Engines(router)
    engines.serve(worker(1), PROMPTS[1])  # the new tokenizer's ids of what the old one spells as PROMPTS[0]
    theirs = Rendition("tokens-2", (token_array((*PROMPTS[1], 7, 8)),))
    decision = router.schedule(ask_of((*PROMPTS[0], 7), {NEW: theirs}), 1.0)
    assert {c.worker: c.cached_tokens for c in decision.candidates} == {worker(0): 0, worker(1): 6 * BLOCK}
    assert decision.chosen.worker == worker(1)
    assert decision.request.namespace == Namespace(NEW, "tokens-2")
    assert decision.request.prompt_tokens == 6 * BLOCK + 2


def test_a_revision_is_learned_from_the_worker_and_nothing_is_claimed_before():
    router = router_of([member(0, None)], learn=True)
    engines = Engines(router)
    engines.serve(worker(0), PROMPTS[0])
    ask = ask_of((*PROMPTS[0], 7))
    early = router.schedule(ask, 1.0)
    assert early.chosen.cached_tokens == 0
    assert early.request.prompt_tokens == len(PROMPTS[0]) + 1  # its load is counted all the same
    assert router.on_models(worker(0).endpoint, NEW, []) == (worker(0),)
    assert router.on_models(worker(0).endpoint, NEW, []) == ()
    engines.serve(worker(0), PROMPTS[0])  # the stream of events is read again
    decision = router.schedule(ask, 1.0)
    assert decision.chosen.cached_tokens == 6 * BLOCK
    assert decision.request.namespace.model_revision == NEW
    for one in (early, decision):
        router.release(one.lease_id, Completion(Outcome.FINISHED), 1.0)
    router.tick(9.0)
    assert router.index.stats().reservations == 0


def test_what_is_configured_for_a_worker_goes_before_what_it_tells():
    router = router_of([member(0, OLD)], learn=True)
    assert router.on_models(worker(0).endpoint, "/models/whatever", []) == ()
    assert router.table.get(worker(0)).revision == OLD


def test_prompts_in_flight_stay_counted_when_a_revision_changes():
    router = router_of([member(0, OLD)])
    decision = router.schedule(ask_of((*PROMPTS[0], 7)), 1.0)
    router.on_membership([member(0, NEW)], 2.0)
    assert router.ledger.load(worker(0), 2.0).active == 1
    assert router.schedule(ask_of((*PROMPTS[0], 7)), 2.0).chosen.cached_tokens == 0
    router.release(decision.lease_id, Completion(Outcome.FINISHED), 3.0)


@pytest.mark.parametrize("chains", [None, {BLOCK: ((1, 2),)}])
def test_chains_known_beforehand_are_of_their_own_revision_only(chains):
    states = [
        WorkerState(worker(n), member(n, revision), 1, 0.0, revision=revision)
        for n, revision in enumerate((OLD, NEW, None))
    ]
    found = editions(replace(ask_of(PROMPTS[0]), chains=chains), states)
    assert [[state.id for state in edition.states] for edition in found] == [
        [worker(0)],
        [worker(1)],
        [worker(2)],
    ]
    assert [edition.request.chains for edition in found] == [chains, None, None]
    assert [edition.request.keyed_prompts for edition in found] == [1, 1, 0]
