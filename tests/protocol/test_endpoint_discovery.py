from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.endpoint_discovery import (
    ALL_WORKERS,
    Delta,
    Health,
    KnownWorker,
    Snapshot,
    StateOfTheWorld,
    pool_resource,
    snapshot,
)

A, B = KnownWorker("10.0.0.1:8000"), KnownWorker("10.0.0.2:8000")


def known(*workers, complete=True, usable=False):
    return snapshot({"p": workers}, complete=complete, usable=usable)


def subscribed(version="", names=(ALL_WORKERS,)):
    stream = StateOfTheWorld()
    stream.receive(names, version, "")
    return stream


def test_there_is_a_list_of_everybody_and_one_for_each_pool():
    both = snapshot({"p": [A], "q": [B, A]}, complete=True)
    assert both.assignments[ALL_WORKERS].workers == (A, B)
    assert both.assignments[pool_resource("q")].workers == (B, A)


def test_an_endpoint_of_two_pools_is_as_in_the_pool_where_it_is_best():
    down, slow = (KnownWorker(A.endpoint, health) for health in (Health.UNHEALTHY, Health.DEGRADED))
    for best, other in ((A, down), (A, slow), (slow, down)):
        for pools in ({"p": [best], "q": [other]}, {"p": [other], "q": [best]}):
            assert snapshot(pools, complete=True).assignments[ALL_WORKERS].workers == (best,)


def test_equal_content_has_equal_versions_in_every_process():
    assert known(A, B) == known(A, B)
    versions = {known(*ws).assignments[ALL_WORKERS].version for ws in ([], [A], [B], [A, B])}
    assert len(versions) == 4
    as_health = {known(KnownWorker(A.endpoint, h)).assignments[ALL_WORKERS].version for h in Health}
    assert len(as_health) == 3


def test_a_list_is_sent_at_once_and_after_each_change_only():
    stream = subscribed()
    first = stream.due(known(A))
    assert first.assignments[ALL_WORKERS].workers == (A,)
    assert stream.due(known(A)) is None
    stream.receive([ALL_WORKERS], first.version, first.nonce)
    assert stream.due(known(A)) is None
    second = stream.due(known(A, B))
    assert second.assignments[ALL_WORKERS].workers == (A, B)
    assert second.nonce != first.nonce
    # Scaled to nothing is a list too.
    assert stream.due(known()).assignments[ALL_WORKERS].workers == ()


def test_a_refused_list_is_not_repeated_until_it_changes():
    stream = subscribed()
    push = stream.due(known(A))
    assert stream.receive([ALL_WORKERS], "", push.nonce)  # a refusal names the version before
    assert stream.due(known(A)) is None
    assert stream.due(known(B)) is not None


def test_an_answer_to_an_outdated_list_is_ignored():
    stream = subscribed()
    old = stream.due(known(A))
    stream.due(known(B))
    assert not stream.receive(["workers/p"], old.version, old.nonce)
    assert stream.names == (ALL_WORKERS,)


def test_whoever_asks_for_more_is_answered():
    stream = subscribed()
    push = stream.due(known(A))
    stream.receive([ALL_WORKERS, "workers/p"], push.version, push.nonce)
    assert set(stream.due(known(A)).assignments) == {ALL_WORKERS, "workers/p"}


def test_an_incomplete_list_is_for_those_that_have_none():
    partly, fit, whole = (
        known(A, complete=False),
        known(A, complete=False, usable=True),
        known(A, B),
    )
    new, old = subscribed(), subscribed(version="from the process before")
    assert new.due(partly) is None
    assert old.due(partly) is None
    assert new.due(fit) is not None
    assert old.due(fit) is None
    assert old.due(whole).assignments[ALL_WORKERS].workers == (A, B)
    delta = Delta()
    delta.receive([ALL_WORKERS], [], {ALL_WORKERS: "from the process before"})
    assert delta.due(fit) is None
    assert delta.due(whole) is not None


def test_nothing_is_said_about_resources_that_are_not_known_or_not_wanted():
    assert subscribed(names=["theirs"]).due(known(A)) is None
    assert subscribed(names=[]).due(known(A)) is None
    assert subscribed().due(Snapshot()) is None


def test_delta_sends_what_changed_and_tells_what_is_not_there():
    stream = Delta()
    stream.receive([ALL_WORKERS, "workers/p", "workers/gone"], [], {})
    first = stream.due(known(A))
    assert set(first.assignments) == {ALL_WORKERS, "workers/p"}
    assert first.removed == ("workers/gone",)
    assert stream.due(known(A)) is None
    two = snapshot({"p": [A], "q": [B]}, complete=True)
    assert set(stream.due(two).assignments) == {ALL_WORKERS}
    stream.receive([], [ALL_WORKERS], {})
    assert stream.due(snapshot({"p": [A]}, complete=True)) is None


def test_delta_does_not_repeat_what_the_client_still_has_unless_it_asks_again():
    stream = Delta()
    stream.receive([ALL_WORKERS], [], {ALL_WORKERS: known(A).assignments[ALL_WORKERS].version})
    assert stream.due(known(A)) is None
    stream.receive([ALL_WORKERS], [], {})
    assert stream.due(known(A)) is not None


workers = st.lists(
    st.builds(KnownWorker, st.sampled_from(["a:1", "b:2", "c:3"]), st.sampled_from(Health)), max_size=4
)


@given(st.lists(st.tuples(workers, st.booleans()), min_size=1), st.booleans())
def test_whatever_happens_the_client_ends_with_the_last_complete_list(history, delta):
    has = {}
    for part, variant in ((0, delta), (1, not delta)):
        # A second stream, to another replica with the same knowledge, of the other variant.
        stream = Delta() if variant else StateOfTheWorld()
        if variant:
            stream.receive([ALL_WORKERS], [], has.get("versions", {}))
        else:
            stream.receive([ALL_WORKERS], has.get("version", ""), "")
        for now, complete in [*history, (history[-1][0], True)]:
            push = stream.due(snapshot({"p": now}, complete=complete))
            if push is not None:
                assert complete
                has["version"] = push.version
                has["versions"] = {name: one.version for name, one in push.assignments.items()}
                has["workers"] = push.assignments[ALL_WORKERS].workers
        final = snapshot({"p": history[-1][0]}, complete=True).assignments[ALL_WORKERS]
        assert has["workers"] == final.workers, part
