"""The decision log's line for a request that was held and not served: refused, expired, left by its client.

It has the fields of `extproc.adapters.decision_log` that there are for it, and no candidates: no worker was
chosen. `decision` and `outcome` say how its wait ended, `admission` how long it was. It holds no prompt text.
"""

from datetime import datetime, timedelta
from typing import Any

from extproc.adapters.holding import Ending, Wait

_STATUS = {Ending.REFUSED: 429, Ending.EXPIRED: 429}


def unserved_record(wait: Wait, at: datetime) -> dict[str, Any]:
    """The line. Null means not known."""
    request, ending = wait.request, wait.ending.value
    return {
        "time": at.isoformat(timespec="milliseconds"),
        "received": (at - timedelta(milliseconds=wait.held_ms)).isoformat(timespec="milliseconds"),
        "request_id": request.request_id,
        "model": request.model,
        "alias": request.alias,
        "pool": request.pool,
        "tenant": request.tenant or None,
        "adapter": request.namespace.adapter,
        "mode": request.mode.value,
        "traffic_class": request.traffic_class or None,
        "decision": ending,
        "load_only": request.load_only,
        "admission": {"held_ms": round(wait.held_ms, 3), "priority": wait.priority},
        "stream": request.stream,
        "prompt_tokens": request.prompt_tokens,
        "outcome": ending,
        "status": _STATUS.get(wait.ending),
        "candidate_workers": [],
    }
