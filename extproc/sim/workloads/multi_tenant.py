"""`multi-tenant`: several kinds of traffic at once on one fleet, each of its own tenant and group.

Definition. Four tenants, none of whose content another shares:

    "docs"    `documents`     questions on few documents                     2 a second
    "agents"  `coding-agent`  sessions of its stand-in, cut to 12 requests   0.1 sessions a second
    "batch"   `azure-control` unlike prompts                                 2 a second
    "launch"  `flood`         a flood on one prefix beside a cold tail       15 and 1.5 a second

Documents and agents arrive as Poisson processes, the batch at its own times, stretched to the rate given, and
the flood when `flood` says. It lasts `duration_s`, 60 s: sessions that begin later are left out. What the
workload asks: whether one tenant's flood or long prompts become another's waiting time. Everything is
generated; there is no trace. `block_size` is 16 throughout.
"""

from collections.abc import Iterator
from dataclasses import replace
from heapq import merge
from itertools import islice, takewhile

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Session, Workload, WorkloadOptions, limited, offered
from extproc.sim.workloads.azure_control import azure_control
from extproc.sim.workloads.coding_agent import coding_agent
from extproc.sim.workloads.documents import documents
from extproc.sim.workloads.flood import flood
from extproc.sim.workloads.lazily import Lazily

_BLOCK_SIZE = 16
_AGENT_TURNS = 12
_AGENT_CONTEXT = 32_768


def multi_tenant(options: WorkloadOptions, *, duration_s: float = 60.0) -> Workload:
    """Four tenants at once: documents, coding agents, unlike prompts, and a flood; reported by tenant.

    See the module's docstring.

    Raises:
        WarmrouteError: a trace is given.
    """
    if options.trace is not None:
        raise WarmrouteError("multi-tenant is defined, not recorded: it takes no trace")
    own = WorkloadOptions(seed=options.seed)

    def parts() -> dict[str, Workload]:
        seed = options.seed
        agents = coding_agent(own, block_size=_BLOCK_SIZE, max_context_tokens=_AGENT_CONTEXT)
        return {
            "docs": offered(documents(own, block_size=_BLOCK_SIZE), rate=2.0, seed=seed),
            "agents": offered(agents, rate=0.1, seed=seed + 1),
            "batch": offered(azure_control(own, block_size=_BLOCK_SIZE), rate=2.0),
            "launch": flood(own, duration_s=duration_s, cold_rate=1.5, hot_rate=15.0, block_size=_BLOCK_SIZE),
        }

    def belonging(tenant: str, workload: Workload) -> Iterator[Session]:
        for session in takewhile(lambda s: (s.arrival_s or 0.0) < duration_s, workload.sessions):
            turns = islice(session.turns, _AGENT_TURNS) if tenant == "agents" else session.turns
            yield replace(session, id=f"{tenant}-{session.id}", tenant=tenant, group=tenant, turns=turns)

    def sessions() -> Iterator[Session]:
        streams = [belonging(tenant, workload) for tenant, workload in parts().items()]
        return merge(*streams, key=lambda session: session.arrival_s or 0.0)

    return Workload(
        name="multi-tenant",
        block_size=_BLOCK_SIZE,
        sessions=Lazily(lambda: sessions() if options.limit is None else limited(sessions(), options.limit)),
        rate=sum(1 for _ in sessions()) / duration_s,
        rollouts=False,
        description="documents, coding agents, unlike prompts and a flood, each of its own tenant",
    )
