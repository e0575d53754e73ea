"""Where the gateway may send a request, and which worker it was that took it.

A gateway knows endpoints. Behind one there may be several data-parallel ranks, and the one that was chosen
is named in a header, which stays the same however often the gateway tries elsewhere. An engine counts its
ranks from 0, whatever their numbers in the deployment, and refuses one it does not have. So only endpoints
with one at that place are named as fallbacks, and whoever takes the request runs it there.
"""

from extproc.core.dp_ranks import place_of
from extproc.core.types import Candidate, Decision, WorkerId
from extproc.core.worker_table import WorkerTable


def named_rank(decision: Decision, table: WorkerTable) -> int | None:
    """The rank of its engine, from 0, that the request names; None: it has only one, or it has left."""
    state = table.get(decision.chosen.worker)
    return None if state is None or state.member.dp_size == 1 else place_of(state.member, state.id)


def destinations(decision: Decision, table: WorkerTable, limit: int) -> tuple[str, ...]:
    """Endpoints in order of preference, each once, at most `limit`: the chosen one, then fallbacks."""
    endpoints = dict.fromkeys(candidate.worker.endpoint for candidate in decision.candidates)
    rank = named_rank(decision, table)
    if rank is None:
        return tuple(endpoints)[:limit]
    return tuple(one for one in endpoints if table.at_place(one, rank) is not None)[:limit]


def taken_by(
    decision: Decision, table: WorkerTable, endpoint: str
) -> tuple[WorkerId | None, Candidate | None]:
    """Who runs the request if `endpoint` has it, and how it was priced; None: no member, or not priced.

    Where no rank is named the engine takes one itself, and the best of those priced there stands for it.
    """
    pool, rank = decision.request.pool, named_rank(decision, table)
    there = [state.id for state in table.at(endpoint) if state.member.pool == pool]
    named = None if rank is None else table.at_place(endpoint, rank)
    if named is not None and named.id in there:
        there = [named.id]
    priced = next((one for one in decision.candidates if one.worker in there), None)
    if priced is not None:
        return priced.worker, priced
    return next(iter(there), None), None
