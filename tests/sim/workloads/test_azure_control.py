import pytest

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.azure_control import azure_control
from tests.sim.workloads.support import flat, hit_share, over

TRACE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "2023-11-16 18:15:46.6805900,374,44\n",
    "2023-11-16 18:15:50.9951690,396,109\n",
    "2023-11-16 18:16:50.9951690,396,0\n",
]


def test_times_and_lengths_are_the_trace_s():
    workload = azure_control(over(TRACE))
    sessions = flat(workload)
    assert [session.arrival_s for session, _ in sessions] == pytest.approx([0.0, 4.314579, 64.314579])
    assert [(t.prompt_tokens, t.output_tokens) for _, (t,) in sessions] == [(374, 44), (396, 109), (396, 1)]
    assert workload.rate == pytest.approx(2 / 64.314579)


def test_nothing_is_shared():
    assert hit_share(azure_control(over(TRACE))) == 0
    assert hit_share(azure_control(WorkloadOptions())) == 0


def test_the_stand_in_has_the_trace_s_rate():
    assert azure_control(WorkloadOptions()).rate == pytest.approx(5.5, rel=0.15)


@pytest.mark.parametrize("bad", ["yesterday,1,2", "2023-11-16 18:15:46.6805900,1", "2023-11-16 18:15:46,x,1"])
def test_a_bad_line_is_named(bad):
    with pytest.raises(WarmrouteError, match="line 3"):
        azure_control(over([*TRACE[:2], bad]))
