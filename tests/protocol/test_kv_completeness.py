from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.kv_completeness import Completeness, Spoiled

RANKS = range(3)


def whole(content):
    return [content.is_whole(rank) for rank in RANKS]


def test_from_the_first_message_on_nothing_is_missing_about_anybody():
    content = Completeness()
    assert whole(content) == [True] * 3
    assert content.mend_from is None


def test_a_clear_before_the_hole_says_nothing():
    content = Completeness()
    content.skip_to(7, "lost")
    content.clear(6, 9, 0, RANKS)
    assert whole(content) == [False] * 3
    content.clear(7, 9, 0, RANKS)
    assert whole(content) == [True, False, False]
    assert content.flaw == "lost"


def test_what_is_to_be_mended_is_asked_for_from_its_beginning():
    content = Completeness()
    content.spoil(5, 99)
    assert content.spoiled == Spoiled(0, 5, 99)
    assert (content.mend_from, content.flaw) == (0, "message 5 could not be read")
    content = Completeness()
    content.lose(4)
    content.lose(9)
    assert content.mend_from == 4


def test_what_cannot_be_had_again_or_broke_what_was_broken_is_not_asked_for():
    content = Completeness()
    content.spoil(5, None)
    assert (whole(content), content.mend_from) == ([False] * 3, None)
    content.spoil(6, 99)
    assert content.mend_from is None, "all before it would still be missing"


def test_a_spoiled_message_before_the_hole_changes_nothing():
    content = Completeness()
    content.skip_to(7, "lost")
    content.clear(8, 9, 1, RANKS)
    content.spoil(6, 99)
    assert whole(content) == [False, True, False]
    content.spoil(9, 99)
    assert (whole(content), content.mend_from) == ([False] * 3, 7)


def test_mending_ends_when_every_rank_has_cleared():
    content = Completeness()
    content.spoil(5, 99)
    content.clear(6, 6, 0, RANKS)
    content.clear(7, 7, 1, RANKS)
    assert content.mend_from == 0
    content.clear(8, 8, 2, RANKS)
    assert (whole(content), content.mend_from) == ([True] * 3, None)


def test_another_router_s_knowledge_may_have_been_whole_for_its_rank():
    assert whole(Completeness(5, frozenset({1}))) == [False, True, False]
    assert whole(Completeness(None)) == [False] * 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["apply", "clear", "skip", "doubt", "spoil", "anew"]), st.sampled_from(RANKS)
        ),
        max_size=40,
    )
)
def test_a_rank_is_whole_unless_something_was_lost_since_its_last_clear(steps):
    content, last, clean = Completeness(), -1, dict.fromkeys(RANKS, True)
    for step, rank in steps:
        match step:
            case "apply":
                last += 1
            case "clear":
                last += 1
                content.clear(last, last, rank, RANKS)
                clean[rank] = True
            case "skip":
                content.skip_to(last + 3, "lost")
                last += 2
            case "doubt":
                last = max(0, last)  # there is nothing to doubt before the first message
                content.doubt("lost")
            case "spoil":
                last += 1
                content.spoil(last, last)
            case "anew":
                content.begin_anew()
                last, clean = -1, dict.fromkeys(RANKS, True)
        if step in ("skip", "doubt", "spoil"):
            clean = dict.fromkeys(RANKS, False)
        assert whole(content) == [clean[rank] for rank in RANKS]
        if content.since == 0:
            assert content.mend_from is None
