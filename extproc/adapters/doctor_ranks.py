"""The doctor on data-parallel ranks: are those on an engine's metrics page the ones that are configured?

A worker whose rank the page does not name has no metrics, and its KV events are looked for at another port.
"""

from collections.abc import Collection

import aiohttp

from extproc.adapters.doctor_findings import Finding, Status
from extproc.core.dp_ranks import learns_rank, mismatch, told_rank
from extproc.core.errors import ProtocolError
from extproc.core.types import Member
from extproc.protocol.engine_metrics import parse_engine_metrics

_TIMEOUT_S = 30.0


async def rank_told_by(member: Member) -> int | None:
    """What a member's page calls its only rank; None: that is described, or the page does not say."""
    if not learns_rank(member):
        return None
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(f"http://{member.endpoint}", timeout=timeout) as session:
        try:
            async with session.get("/metrics", raise_for_status=True) as reply:
                return told_rank(member, parse_engine_metrics(await reply.text()))
        except (aiohttp.ClientError, TimeoutError, ProtocolError, UnicodeDecodeError):
            return None  # the doctor's other checks tell why


def check_ranks(member: Member, ranks: Collection[int]) -> Finding | None:
    """What is to be said of the ranks on a member's page; None: it has one, which is all there is."""
    who, check = member.endpoint, "ranks"
    found = mismatch(member, ranks)
    if found is not None:
        missing = {worker.dp_rank for worker in member.workers()} - set(ranks)
        alone = member.dp_size == len(ranks) == 1  # then its metrics are found nevertheless
        status = Status.FAIL if missing and not alone else Status.WARN
        return Finding(who, check, status, found.detail, found.advice)
    if not ranks or set(ranks) == {0}:
        return None
    names = ", ".join(map(str, sorted(ranks)))
    return Finding(who, check, Status.OK, f"data-parallel {'rank' if len(ranks) == 1 else 'ranks'} {names}")
