"""`flood`: a flood of requests on one prefix, and a cold tail that shares nothing.

Definition. From the beginning to the end, `cold_rate` requests a second come whose prompts of `cold_tokens`
are unlike every other: group "cold". Between `flood_from_s` and `flood_to_s` another `hot_rate` a second come
that share their first `hot_tokens`, with `tail_tokens` of their own: group "hot". Both are Poisson processes;
every request is a session of its own and is answered with `output_tokens`. What the workload asks: whether
the flood is spread before it queues, and whether the cold requests are served meanwhile.

Defaults: 40 s, cold 3 a second of 3,000 tokens; flood from 10 s to 25 s, 120 a second sharing 4,000 tokens
with 50 of their own; output 100; `block_size` 16. That is more than one engine of the preset "medium" can
decode, and less than four can. There is no trace.
"""

from collections.abc import Iterator
from heapq import merge
from random import Random

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Session, Turn, Workload, WorkloadOptions, limited
from extproc.sim.workloads.history import History, key_of
from extproc.sim.workloads.lazily import Lazily


def flood(
    options: WorkloadOptions,
    *,
    duration_s: float = 40.0,
    cold_rate: float = 3.0,
    cold_tokens: int = 3000,
    flood_from_s: float = 10.0,
    flood_to_s: float = 25.0,
    hot_rate: float = 120.0,
    hot_tokens: int = 4000,
    tail_tokens: int = 50,
    output_tokens: int = 100,
    block_size: int = 16,
) -> Workload:
    """A flood on one prefix beside a cold tail that shares nothing, open loop; reported by group.

    See the module's docstring.

    Raises:
        WarmrouteError: a trace is given.
    """
    if options.trace is not None:
        raise WarmrouteError("flood is defined, not recorded: it takes no trace")
    space = key_of("flood", options.seed)

    def poisson(begin: float, end: float, rate: float, group: str) -> Iterator[Session]:
        rng = Random(key_of(space, group))  # noqa: S311 - a simulation
        at, number = begin + rng.expovariate(rate), 0
        while at < end:
            history = History(block_size, space)
            if group == "hot":
                history.extend(key_of("hot"), hot_tokens)
                history.extend(key_of("hot", number), tail_tokens)
            else:
                history.extend(key_of("cold", number), cold_tokens)
            prompt = history.tokens
            history.extend(0, output_tokens)
            turn = Turn(prompt, output_tokens, history.blocks)
            yield Session(id=f"{group}{number}", turns=(turn,), arrival_s=at, group=group)
            at, number = at + rng.expovariate(rate), number + 1

    def sessions() -> Iterator[Session]:
        return merge(
            poisson(0.0, duration_s, cold_rate, "cold"),
            poisson(flood_from_s, flood_to_s, hot_rate, "hot"),
            key=lambda session: session.arrival_s or 0.0,
        )

    return Workload(
        name="flood",
        block_size=block_size,
        sessions=Lazily(lambda: sessions() if options.limit is None else limited(sessions(), options.limit)),
        rate=cold_rate + hot_rate * (flood_to_s - flood_from_s) / duration_s,
        rollouts=False,
        description=f"{hot_rate:g}/s on one prefix for {flood_to_s - flood_from_s:g} s, cold {cold_rate:g}/s",
    )
