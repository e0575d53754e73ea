from extproc.sim.workloads.lazily import Lazily


def test_every_iteration_begins_afresh():
    made = []

    def make():
        made.append(1)
        yield from (1, 2, 3)

    numbers = Lazily(make)
    assert made == []
    assert list(numbers) == [1, 2, 3] == list(numbers)
    assert len(made) == 2
