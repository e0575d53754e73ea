from dataclasses import replace

import pytest

from extproc.core.policies import POLICIES
from extproc.core.types import Reason
from extproc.journal.header import JournalError
from extproc.journal.replay import Replay
from extproc.journal.tap import INPUTS
from tests.support.recorded import HEADER, Traffic


@pytest.fixture(scope="module")
def traffic():
    return Traffic().run(5400)


def test_five_thousand_requests_with_faults_are_decided_again_exactly(traffic):
    replay = Replay(HEADER, POLICIES)
    steps = list(replay.run(traffic.entries))
    decided = [step.decision for step in steps if step.decision is not None]
    assert len(decided) == len(traffic.decisions) >= 5000
    assert all(step.exact for step in steps)
    for again, before in zip(decided, traffic.decisions, strict=True):
        assert again.candidates == before.candidates
        assert (again.reason, again.policy, again.shadow) == (before.reason, before.policy, before.shadow)
        assert again.lease_id == before.lease_id
    assert replay.inputs == len(traffic.entries)


def test_the_traffic_was_of_all_kinds(traffic):
    reasons = {decision.reason for decision in traffic.decisions}
    assert reasons >= {Reason.WARM_EXACT, Reason.WARM_PARTIAL, Reason.LOAD_ONLY, Reason.SESSION_MOVED}
    chosen = [decision.chosen for decision in traffic.decisions]
    assert any(c.cached_tokens for c in chosen)
    assert any(c.confidence < 1.0 for d in traffic.decisions for c in d.candidates)
    assert any(len(d.candidates) < 4 for d in traffic.decisions)
    hashed = [h for entry in traffic.entries if INPUTS[entry[0]] == "on_kv_events" for h in entry[2]]
    assert any(found is None for _, found in hashed)
    assert {INPUTS[entry[0]] for entry in traffic.entries} == set(INPUTS)


def test_another_policy_is_asked_on_the_same_ground(traffic):
    part = traffic.entries[:3000]
    plain = list(Replay(HEADER, POLICIES).run(part))
    other = replace(HEADER, policy="least-load", others=(), shadow=())
    steps = list(Replay(HEADER, POLICIES, other).run(part))
    assert all(step.exact for step in steps)
    assert [step.decision for step in steps] == [step.decision for step in plain]
    changed = 0
    for step in steps:
        if step.decision is None or step.decision.request.tenant:  # tenants have bounds of their own
            continue
        least = min((c.queued_prefill_tokens, c.active) for c in step.decision.candidates)
        assert (step.instead.queued_prefill_tokens, step.instead.active) == least
        changed += step.instead.worker != step.decision.chosen.worker
    assert changed > 40


def test_the_same_settings_change_nothing(traffic):
    same = replace(HEADER, shadow=())
    for step in Replay(HEADER, POLICIES, same).run(traffic.entries[:3000]):
        assert step.decision is None or step.instead is step.decision.chosen


def test_other_settings_change_what_they_are_about(traffic):
    bound = replace(HEADER.costs, max_extra_ttft_ms=0.0, max_warm_wait_ms=0.0)
    steps = list(Replay(HEADER, POLICIES, replace(HEADER, costs=bound)).run(traffic.entries[:3000]))
    assert all(step.exact for step in steps)
    assert any(step.instead_reason is Reason.WARM_DENIED_WAIT for step in steps)
    assert not any(step.decision and step.decision.reason is Reason.WARM_DENIED_WAIT for step in steps)


def test_a_drift_is_seen(traffic):
    part = traffic.entries[:400]
    steps = list(Replay(replace(HEADER, seed=8), POLICIES).run(part))
    assert any(not step.exact for step in steps)


def test_a_policy_that_is_not_installed_is_named():
    with pytest.raises(JournalError, match="'mine', which is not installed"):
        Replay(replace(HEADER, policy="mine"), POLICIES)


@pytest.mark.parametrize(
    "entry",
    [
        [99, []],
        [0, [{}, 1.0]],
        "x",
        [1, ["a"]],
        [9, [["a", 0], [{"stored": [[7, 1]], "parent": None, "tokens": 0}], 1.0], []],
    ],
)
def test_an_entry_that_makes_no_sense_is_named(entry):
    with pytest.raises(JournalError, match="entry 0"):
        list(Replay(HEADER, POLICIES).run([entry]))
