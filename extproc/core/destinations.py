"""Where the gateway may send a request, and which worker it was that took it.

A gateway knows endpoints. Behind one there may be several data-parallel ranks, and the one that was chosen
is named in a header, which stays the same however often the gateway tries elsewhere. An engine refuses a rank
it does not have. So only endpoints that have the rank are named as fallbacks, and whoever takes the request
runs it on that rank.
"""

from extproc.core.types import Candidate, Decision, WorkerId
from extproc.core.worker_table import WorkerTable


def named_rank(decision: Decision, table: WorkerTable) -> int | None:
    """The rank that the request names; None: the engine has only one, or it has left."""
    state = table.get(decision.chosen.worker)
    return None if state is None or state.member.dp_size == 1 else state.id.dp_rank


def destinations(decision: Decision, table: WorkerTable, limit: int) -> tuple[str, ...]:
    """Endpoints in order of preference, each once, at most `limit`: the chosen one, then fallbacks."""
    endpoints = dict.fromkeys(candidate.worker.endpoint for candidate in decision.candidates)
    rank = named_rank(decision, table)
    if rank is None:
        return tuple(endpoints)[:limit]
    return tuple(one for one in endpoints if table.get(WorkerId(one, rank)) is not None)[:limit]


def taken_by(
    decision: Decision, table: WorkerTable, endpoint: str
) -> tuple[WorkerId | None, Candidate | None]:
    """Who runs the request if `endpoint` has it, and how it was priced; None: no member, or not priced.

    Where no rank is named the engine takes one itself, and the best of those priced there stands for it.
    """
    pool, rank = decision.request.pool, named_rank(decision, table)
    there = [state.id for state in table.at(endpoint) if state.member.pool == pool]
    if rank is not None and WorkerId(endpoint, rank) in there:
        there = [WorkerId(endpoint, rank)]
    priced = next((one for one in decision.candidates if one.worker in there), None)
    if priced is not None:
        return priced.worker, priced
    return next(iter(there), None), None
