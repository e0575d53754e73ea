from collections import Counter

from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.multi_tenant import multi_tenant
from tests.sim.workloads.support import flat


def test_every_tenant_is_there_in_its_own_group_and_shares_with_no_other():
    sessions = flat(multi_tenant(WorkloadOptions()))
    tenants = Counter(session.tenant for session, _ in sessions)
    assert set(tenants) == {"docs", "agents", "batch", "launch"}
    assert min(tenants.values()) >= 2
    owner: dict[int, str] = {}
    for session, turns in sessions:
        assert session.group == session.tenant
        for turn in turns:
            assert {owner.setdefault(block, session.tenant) for block in turn.blocks} == {session.tenant}


def test_nothing_begins_after_the_end():
    assert all(session.arrival_s < 20 for session, _ in flat(multi_tenant(WorkloadOptions(), duration_s=20)))
