"""`overload`: more than the fleet can serve for a while, from one of three tenants.

Definition. All requests have unlike prompts of `prompt_tokens` and are answered with `output_tokens`; each is
a session of its own. Each tenant is a Poisson process and a group:

    "gold"    10 a second, all the time: more than a third of what the fleet serves, so a fair share is not
              enough, and it may go first (`--priorities gold=1`)
    "quiet"   2 a second, all the time: far less than a fair share
    "flood"   2 a second, and `flood_rate` more between `flood_from_s` and `flood_to_s`

Defaults: 60 s, flood from 10 s to 40 s with 30 a second; prompts 1,500, answers 150; `block_size` 16. Four
engines of the preset "medium" serve about 20 of these a second, so there is about twice too much while the
flood lasts. What the workload asks: whether the flood becomes the others' waiting time, and how much of it is
served while its clients still wait. There is no trace.
"""

from collections.abc import Iterator
from heapq import merge
from random import Random

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Session, Turn, Workload, WorkloadOptions, limited
from extproc.sim.workloads.history import History, key_of
from extproc.sim.workloads.lazily import Lazily


def overload(
    options: WorkloadOptions,
    *,
    duration_s: float = 60.0,
    gold_rate: float = 10.0,
    quiet_rate: float = 2.0,
    flood_base_rate: float = 2.0,
    flood_from_s: float = 10.0,
    flood_to_s: float = 40.0,
    flood_rate: float = 30.0,
    prompt_tokens: int = 1500,
    output_tokens: int = 150,
    block_size: int = 16,
) -> Workload:
    """Three tenants, of which one floods the fleet for a while; reported by tenant.

    See the module's docstring.

    Raises:
        WarmrouteError: a trace is given.
    """
    if options.trace is not None:
        raise WarmrouteError("overload is defined, not recorded: it takes no trace")
    space = key_of("overload", options.seed)

    def poisson(tenant: str, part: str, begin: float, end: float, rate: float) -> Iterator[Session]:
        rng = Random(key_of(space, tenant, part))  # noqa: S311 - a simulation
        at, number = begin + rng.expovariate(rate), 0
        while at < end:
            history = History(block_size, space)
            history.extend(key_of(tenant, part, number), prompt_tokens)
            prompt = history.tokens
            history.extend(0, output_tokens)
            turn = Turn(prompt, output_tokens, history.blocks)
            session = f"{tenant}-{part}{number}"
            yield Session(id=session, turns=(turn,), arrival_s=at, group=tenant, tenant=tenant)
            at, number = at + rng.expovariate(rate), number + 1

    def sessions() -> Iterator[Session]:
        return merge(
            poisson("gold", "", 0.0, duration_s, gold_rate),
            poisson("quiet", "", 0.0, duration_s, quiet_rate),
            poisson("flood", "", 0.0, duration_s, flood_base_rate),
            poisson("flood", "more", flood_from_s, flood_to_s, flood_rate),
            key=lambda session: session.arrival_s or 0.0,
        )

    lasting = gold_rate + quiet_rate + flood_base_rate
    return Workload(
        name="overload",
        block_size=block_size,
        sessions=Lazily(lambda: sessions() if options.limit is None else limited(sessions(), options.limit)),
        rate=lasting + flood_rate * (flood_to_s - flood_from_s) / duration_s,
        rollouts=False,
        description=f"{lasting:g}/s of three tenants, of one {flood_rate:g}/s more for a while",
    )
