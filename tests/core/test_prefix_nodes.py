import gc
import tracemalloc
from collections import OrderedDict
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.prefix_nodes import NOWHERE, WAYS, PrefixNodes

HOUR = 3600.0


def test_a_node_is_found_by_its_hash_for_an_hour_after_its_last_use():
    nodes = PrefixNodes(100)
    assert nodes.find(7, 1.0) == NOWHERE
    slot = nodes.put(7, 1.0, 5)
    assert nodes.find(7, 2.0) == slot
    assert (nodes.first[slot], nodes.last[slot], nodes.born[slot], nodes.uses[slot]) == (1.0, 1.0, 5, 1)
    assert nodes.put(7, 1.0 + HOUR, 6) == slot
    assert (nodes.first[slot], nodes.last[slot], nodes.born[slot], nodes.uses[slot]) == (
        1.0,
        1.0 + HOUR,
        5,
        2,
    )
    assert nodes.find(7, 1.0 + 2 * HOUR) == slot
    assert nodes.find(7, 1.1 + 2 * HOUR) == NOWHERE


def test_what_was_idle_for_an_hour_starts_anew():
    nodes = PrefixNodes(100)
    slot = nodes.put(7, 1.0, 5)
    nodes.breadth[slot] = nodes.continued[slot] = 3
    nodes.end(slot)
    assert nodes.put(7, 1.1 + HOUR, 9) == slot
    assert (nodes.first[slot], nodes.born[slot], nodes.uses[slot]) == (1.1 + HOUR, 9, 1)
    assert (nodes.breadth[slot], nodes.continued[slot], nodes.last_end([7], 1.1 + HOUR)) == (0, 0, NOWHERE)
    assert len(nodes) == 1


def test_ends_are_told_from_other_nodes():
    nodes = PrefixNodes(WAYS)  # one set
    end, other = nodes.put(7, 1.0, 0), nodes.put(8, 1.0, 0)
    assert nodes.last_end([7], 1.0) == NOWHERE
    nodes.end(end)
    nodes.end(end)
    assert (nodes.last_end([7], 1.0), nodes.last_end([8], 1.0)) == (end, NOWHERE)
    nodes.end(other)
    for key in range(100, 100 + WAYS):
        nodes.put(key, 2.0, 0)
    assert [nodes.last_end([key], 2.0) for key in (7, 8, *range(100, 100 + WAYS))] == [NOWHERE] * (2 + WAYS)
    nodes.end(nodes.find(103, 2.0))
    assert nodes.last_end([103], 2.0) == nodes.find(103, 2.0)


def test_the_last_of_several_ends_is_found():
    nodes = PrefixNodes(100)
    slots = [nodes.put(key, float(at), 0) for at, key in enumerate((7, 8, 9))]
    nodes.end(slots[0])
    nodes.end(slots[1])
    assert nodes.last_end([7, 8, 9], 3.0) == slots[1]
    assert nodes.last_end([8, 7], 3.0) == slots[0]
    nodes.put(7, HOUR, 0)
    assert nodes.last_end([7, 8, 9], 1.5 + HOUR) == slots[0]  # the other was idle for too long
    assert nodes.last_end([], 3.0) == NOWHERE


def test_a_hash_of_zero_is_a_hash():
    nodes = PrefixNodes(WAYS)
    assert nodes.find(0, 1.0) == NOWHERE
    slot = nodes.put(0, 1.0, 0)
    assert nodes.find(0, 1.0) == slot
    nodes.end(slot)
    for key in range(1, WAYS):
        nodes.put(key, 1.0, 0)
    assert nodes.last_end([0], 1.0) == slot


@given(st.integers(1, WAYS), st.lists(st.integers(0, 12), max_size=60))
def test_one_set_keeps_what_was_used_most_recently(max_nodes, keys):
    nodes, model = PrefixNodes(max_nodes), OrderedDict()
    for key in keys:
        slot = nodes.put(key, 1.0, 0)
        model[key] = model.get(key, 0) + 1
        model.move_to_end(key)
        if len(model) > max_nodes:
            model.popitem(last=False)
        assert nodes.uses[slot] == model[key]
    assert len(nodes) == len(model)
    assert {key for key in range(13) if nodes.find(key, 1.0) != NOWHERE} == set(model)


def test_of_many_sets_nearly_everything_recent_is_kept():
    nodes, rng = PrefixNodes(4096), Random(1)
    keys = [rng.getrandbits(64) for _ in range(20_000)]
    for key in keys:
        nodes.put(key, 1.0, 0)
    assert len(nodes) == 4096
    recent = keys[-2048:]
    assert sum(nodes.find(key, 1.0) != NOWHERE for key in recent) > 0.95 * len(recent)


def test_memory_is_bounded_by_the_number_of_nodes():
    gc.collect()
    tracemalloc.start()
    try:
        nodes, rng = PrefixNodes(8192), Random(1)

        def traffic() -> None:
            for _ in range(40_000):
                slot = nodes.put(rng.getrandbits(64), 1.0, 0)
                nodes.end(slot)

        traffic()
        at_first, _ = tracemalloc.get_traced_memory()
        traffic()
        gc.collect()
        at_last, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert at_first < 320 * 8192
    assert at_last - at_first < 10_000
