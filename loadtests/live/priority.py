"""Cores for gateways: what a router decides, measured without what it waits for a core.

Engines of a small machine fill all its cores, and each wake-up of a proxy or router waits for one of them for
milliseconds. Where gateways run in production they do not share cores with engines. So on demand every
process of a target, and the client that measures, go first whenever they have something to do (`SCHED_RR`),
alike for all targets; engines get what is left.
"""

import os
from pathlib import Path

from extproc.core.errors import WarmrouteError

_PROC = Path("/proc")


class PriorityError(WarmrouteError):
    """Processes may not be given priority here; the message says what is needed."""


def descendants(root: int) -> set[int]:
    """Every process that `root` has started, and those that they have."""
    parents: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, left = set[int](), [root]
    while left:
        here = left.pop()
        children = [pid for pid, parent in parents.items() if parent == here]
        found.update(children)
        left += children
    return found


def prefer(pids: set[int]) -> None:
    """Let every thread of these processes go first, and those they start; what we start ourselves does not.

    Processes that have ended are passed over.

    Raises:
        PriorityError: we may not.
    """
    for pid in sorted(pids):
        try:
            threads = [int(thread.name) for thread in (_PROC / str(pid) / "task").iterdir()]
        except OSError:
            continue
        for thread in threads:
            policy = os.SCHED_RR | (os.SCHED_RESET_ON_FORK if pid == os.getpid() else 0)
            try:
                os.sched_setscheduler(thread, policy, os.sched_param(1))
            except ProcessLookupError:
                continue
            except (AttributeError, PermissionError):
                raise PriorityError(
                    "--gateways-first needs Linux, and root or CAP_SYS_NICE: processes are given priority"
                ) from None
