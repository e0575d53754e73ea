from hypothesis import given
from hypothesis import strategies as st

from extproc.core.kv_runs import Ages, Runs


def make():
    ages = Ages()
    runs = Runs(ages, lambda handle: len(given_up.append(handle) or "x"))
    given_up = []
    return ages, runs, given_up


def test_a_run_grows_at_its_end_and_another_begins_where_it_forks():
    _, runs, _ = make()
    runs.add(None, [1, 2])
    runs.add(2, [3])
    runs.add(2, [4, 5])
    assert [(run.parent, run.handles) for run in runs] == [(None, [1, 2, 3]), (2, [4, 5])]


def test_the_oldest_leaf_is_the_one_that_grew_the_longest_ago():
    ages, runs, given_up = make()
    runs.add(None, [1, 2])
    runs.add(None, [11])
    runs.add(2, [3])
    assert ages.oldest().handles == [11]
    assert runs.evict(ages.oldest()) == 1
    assert given_up == [11]
    runs.remove(11, 0)
    assert ages.oldest().handles == [1, 2, 3]


def test_what_others_hang_below_is_no_leaf_until_they_are_gone():
    ages, runs, _ = make()
    runs.add(None, [1, 2, 3])
    runs.add(2, [9])
    runs.remove(3, 0)
    assert ages.oldest().handles == [9]
    runs.remove(9, 0)
    assert ages.oldest().handles == [1, 2]


def test_a_hole_keeps_its_place_until_all_behind_it_is_gone():
    _, runs, _ = make()
    runs.add(None, [1, 2, 3])
    runs.remove(2, 22)
    assert runs.gone == {2: 22}
    runs.remove(3, 33)
    assert not runs.gone
    assert [run.handles for run in runs] == [[1]]


def test_entries_of_runs_that_are_no_more_do_not_pile_up():
    ages, runs, _ = make()
    for handle in range(5000):
        runs.add(None, [handle])
        runs.remove(handle, 0)
    assert len(ages._heap) < 200
    assert ages.oldest() is None
    runs.add(None, [1])
    runs.clear()
    assert ages.oldest() is None
    assert list(runs) == []


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.booleans()), max_size=60))
def test_leaves_and_holes_are_what_the_names_say(steps):
    """A handle is its own path, so what hangs below what can be read off it."""
    ages, runs, _ = make()
    held, touched = set(), {}
    for now, (path, removes) in enumerate(steps):
        name = bytes(path)
        if removes:
            if name in held:
                held.discard(name)
                runs.remove(name, 0)
            elif name in runs.gone:
                continue
        elif name not in held:
            if len(name) > 1 and name[:-1] not in held:
                continue
            held.add(name)
            touched[name] = now
            if name in runs.gone:
                del runs.gone[name]
            else:
                runs.add(name[:-1] or None, [name])
        holes = {name[:cut] for name in held for cut in range(1, len(name))} - held
        assert set(runs.gone) == holes
        assert {handle for run in runs for handle in run.handles} == held | holes
        leaves = {
            name for name in held if not any(other != name and other.startswith(name) for other in held)
        }
        oldest = ages.oldest()
        assert (oldest is None) == (not leaves)
        if oldest is not None:
            assert oldest.handles[-1] in leaves
    for name in sorted(held, key=len, reverse=True):
        runs.remove(name, 0)
    assert not runs.gone
    assert list(runs) == []
