from array import array

from hypothesis import given
from hypothesis import strategies as st

from extproc.analysis.alignment import MIN_MOVED, MIN_RUN, Run, align


def tokens(ids) -> bytes:
    return array("I", ids).tobytes()


def block(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def test_a_changed_value_leaves_one_run_behind_it():
    one = [*block(0, 10), 500, 501, *block(100, 50), 700, 701]
    other = [*block(0, 10), 600, 601, 602, *block(100, 50), 800, 801]
    assert align(tokens(one), tokens(other), 10, 1000) == [Run(12, 13, 50)]


def test_moved_text_is_found_where_it_went():
    first, second = block(100, 40), block(200, 30)
    one = [0, *first, *second, *block(900, 10)]
    other = [0, *second, *first, *block(900, 10)]
    assert align(tokens(one), tokens(other), 1, 1000) == [Run(41, 1, 30), Run(1, 31, 40), Run(71, 71, 10)]


def test_short_coincidences_are_no_runs():
    one = [0, *block(100, MIN_RUN - 1), *block(300, 300), *block(700, MIN_MOVED - 1)]
    other = [1, *block(100, MIN_RUN - 1), 2, *block(700, MIN_MOVED - 1)]
    assert align(tokens(one), tokens(other), 0, 1000) == []


def test_text_given_twice_does_not_look_moved():
    text = block(100, 40)
    one = [0, *text, *block(500, 10)]
    other = [1, *text, *text, *block(500, 10)]
    assert align(tokens(one), tokens(other), 0, 1000) == [Run(1, 1, 40), Run(41, 81, 10)]


def test_no_more_is_read_than_the_limit():
    one = [0, *block(100, 500)]
    assert align(tokens(one), tokens([1, *block(100, 500)]), 0, 101) == [Run(1, 1, 100)]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_runs_are_equal_ascend_and_do_not_overlap(pieces, order):
    one = [token for piece in pieces for token in piece]
    other = [token for at in order if at < len(pieces) for token in pieces[at]]
    for run in align(tokens(one), tokens(other), 0, 1000):
        assert one[run.earlier : run.earlier + run.length] == other[run.later : run.later + run.length]
        assert run.length >= MIN_RUN
    runs = align(tokens(one), tokens(other), 0, 1000)
    ends = [0, *(run.later + run.length for run in runs)]
    assert all(run.later >= end for run, end in zip(runs, ends, strict=False))
