from extproc.core.policies import POLICIES as CORE
from extproc.sim.policies import POLICIES


def test_every_policy_of_the_live_server_and_the_bound_can_be_simulated():
    assert set(CORE) | {"oracle"} <= set(POLICIES)
