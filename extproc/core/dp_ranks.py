"""Which of an engine server's data-parallel ranks is which worker.

vLLM numbers the ranks of a deployment, and a server may host only some of them:

| load balancing of vLLM | a server hosts | its metrics, KV events, their ports name | a request names |
|---|---|---|---|
| internal | all ranks | 0 to size - 1 | 0 to size - 1 |
| hybrid (`--data-parallel-start-rank`) | those of its node | start to start + size - 1 | 0 to size - 1 |
| external (`--data-parallel-rank`) | one | its number | none: there is no other |

So a worker's rank is its number in the deployment, and requests name its place in its server. Where a server
hosts one rank there is nothing to tell apart, and whatever number it names is that rank's: a pool's workers
behind one name or Service then need not be described one by one.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from extproc.core.types import EngineMetrics, Member, WorkerId


class Mismatch(NamedTuple):
    """What a server's page says of its ranks against what it is described with, and what to do about it."""

    detail: str
    advice: str


def place_of(member: Member, worker: WorkerId) -> int:
    """What a request names to be served by `worker`, one of the member's."""
    return worker.dp_rank - (member.dp_start_rank or 0)


def by_worker(
    workers: Sequence[WorkerId], by_rank: Mapping[int, EngineMetrics]
) -> dict[WorkerId, EngineMetrics]:
    """A server's page, by its workers; those it says nothing of are left out."""
    if len(workers) == 1 and len(by_rank) == 1:
        return dict(zip(workers, by_rank.values(), strict=True))
    return {worker: by_rank[worker.dp_rank] for worker in workers if worker.dp_rank in by_rank}


def learns_rank(member: Member) -> bool:
    """Whether the number of a member's only rank is what its page says."""
    return member.dp_size == 1 and member.dp_start_rank is None


def told_rank(member: Member, ranks: Collection[int]) -> int | None:
    """The number of a member's only rank, by its page; None: it is described, or there are several."""
    return next(iter(ranks)) if learns_rank(member) and len(ranks) == 1 else None


def mismatch(member: Member, ranks: Collection[int]) -> Mismatch | None:
    """How the ranks on a member's page differ from those it is described with; None: they do not."""
    expected = [worker.dp_rank for worker in member.workers()]
    seen = sorted(ranks)
    if not seen or seen == expected or told_rank(member, ranks) is not None:
        return None
    detail = f"the page names data-parallel {_named(seen)}, the configuration expects {_named(expected)}"
    start, size = seen[0], len(seen)
    if seen[-1] - start >= size:
        return Mismatch(detail, "the ranks behind one address must follow each other: is it one server's?")
    return Mismatch(
        detail,
        f"set `dp_size: {size}` and `dp_start_rank: {start}` for it: as the engine's "
        "--data-parallel-size-local and --data-parallel-start-rank (or --data-parallel-rank) say",
    )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
