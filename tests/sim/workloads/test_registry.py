import pytest

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads import WORKLOADS
from tests.sim.workloads.support import check_sound, flat, over

DEFINED = {"rl-rollouts", "rl-rollouts-distinct", "documents", "flood", "multi-tenant", "overload"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_runs_without_data_and_is_sound(name):
    workload = WORKLOADS[name](WorkloadOptions(seed=3))
    assert workload.name == name
    assert (WORKLOADS[name].__doc__ or "").splitlines()[0].strip()
    check_sound(workload)


@pytest.mark.parametrize("name", WORKLOADS)
def test_one_seed_is_one_workload_and_another_seed_another(name):
    def made(seed):
        return flat(WORKLOADS[name](WorkloadOptions(seed=seed, limit=40)))

    def essence(sessions):
        return [
            (s.id, s.arrival_s, [(t.prompt_tokens, t.output_tokens, t.blocks) for t in ts])
            for s, ts in sessions
        ]

    assert essence(made(1)) == essence(made(1))
    assert essence(made(1)) != essence(made(2))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_limit_is_kept(name):
    workload = WORKLOADS[name](WorkloadOptions(limit=25))
    assert sum(len(turns) for _, turns in flat(workload)) == 25


@pytest.mark.parametrize("name", sorted(DEFINED))
def test_a_workload_that_is_defined_takes_no_trace(name):
    with pytest.raises(WarmrouteError, match="takes no trace"):
        WORKLOADS[name](over([]))


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - DEFINED))
def test_a_trace_that_is_something_else_is_refused_by_line(name):
    with pytest.raises(WarmrouteError, match="line 1"):
        flat(WORKLOADS[name](over(['{"something": "else"}'])))
