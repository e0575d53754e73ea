from extproc.core.adapter_slots import AdapterSlots, Standing
from extproc.core.types import Member, WorkerId
from extproc.core.worker_table import WorkerState

A, B, C = (WorkerId(f"10.0.0.{n}:8000") for n in (1, 2, 3))
STATES = [WorkerState(worker, Member(worker.endpoint), 1, 0.0) for worker in (A, B, C)]


def eligible(slots, adapter):
    return [state.id for state in slots.eligible(STATES, adapter)]


def test_requests_go_where_the_adapter_is_registered():
    slots = AdapterSlots()
    slots.on_models(A.endpoint, ["law"])
    slots.on_models(B.endpoint, [])
    assert eligible(slots, "law") == [A]
    assert eligible(slots, None) == [A, B, C]
    slots.on_models(B.endpoint, ["law"])  # loaded at run time
    assert eligible(slots, "law") == [A, B]
    slots.on_models(A.endpoint, [])  # unloaded
    assert eligible(slots, "law") == [B]


def test_workers_that_have_not_told_are_asked_only_if_nobody_has_it():
    slots = AdapterSlots()
    slots.on_models(A.endpoint, [])
    assert eligible(slots, "law") == [B, C]
    slots.on_models(B.endpoint, [])
    slots.on_models(C.endpoint, [])
    assert eligible(slots, "law") == [A, B, C]


def test_before_anyone_has_told_everyone_may_serve():
    assert eligible(AdapterSlots(), "law") == [A, B, C]


def test_an_adapter_is_known_if_any_worker_has_told_of_it():
    slots = AdapterSlots()
    slots.on_models(A.endpoint, ["law"])
    slots.on_metrics(C, ("tax",), 2)  # it has not told what it has
    assert [slots.known(name) for name in ("law", "tax", "made up")] == [True, True, False]


def test_slots_are_followed_least_recently_used_out():
    slots = AdapterSlots()
    slots.on_models(A.endpoint, ["a", "b", "c"])
    assert slots.standing(A, "a") is Standing.LOADABLE
    slots.on_metrics(A, (), 2)
    for adapter in ("a", "b", "a", "c"):
        slots.on_use(A, adapter)
    assert [slots.standing(A, name) for name in "abc"] == [
        Standing.LOADED,
        Standing.LOADABLE,
        Standing.LOADED,
    ]
    slots.on_metrics(A, ("b", "c"), 2)
    assert [slots.standing(A, name) for name in "abc"] == [Standing.FULL, Standing.LOADED, Standing.LOADED]
    slots.on_metrics(A, (), 2)
    assert slots.standing(A, "a") is Standing.LOADABLE


def test_an_active_adapter_is_not_the_one_that_goes():
    slots = AdapterSlots()
    slots.on_models(A.endpoint, ["a", "b", "c"])
    slots.on_metrics(A, ("a",), 2)
    for adapter in ("b", "c"):
        slots.on_use(A, adapter)
    assert slots.standing(A, "a") is Standing.LOADED
    assert slots.standing(A, "b") is Standing.LOADABLE


def test_an_adapter_that_is_unloaded_leaves_its_slot():
    slots = AdapterSlots()
    slots.on_models(A.endpoint, ["a"])
    slots.on_use(A, "a")
    slots.on_models(A.endpoint, [])
    assert slots.standing(A, "a") is Standing.ABSENT
    slots.on_models(A.endpoint, ["a"])
    assert slots.standing(A, "a") is Standing.LOADABLE


def test_what_loading_costs():
    slots = AdapterSlots()
    slots.on_models(A.endpoint, ["a", "b"])
    assert slots.load_ms(A, None, 20.0) == 0.0
    assert slots.load_ms(A, "a", 20.0) == 20.0
    slots.on_use(A, "a")
    assert slots.load_ms(A, "a", 20.0) == 0.0
    slots.on_metrics(A, ("a",), 1)
    assert slots.load_ms(A, "b", 20.0) > 20.0


def test_workers_that_left_are_forgotten():
    slots = AdapterSlots()
    slots.on_models(A.endpoint, ["a"])
    slots.on_use(A, "a")
    slots.on_use(B, "a")
    slots.keep(lambda endpoint: endpoint == C.endpoint)
    assert slots.standing(A, "a") is Standing.UNKNOWN
    assert slots.standing(B, "a") is Standing.UNKNOWN


def test_a_worker_without_adapters_takes_no_room():
    slots = AdapterSlots()
    slots.on_metrics(A, (), None)
    slots.on_use(A, None)
    assert slots._slots == {}
