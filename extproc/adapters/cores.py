"""How many cores this process may use."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup/cpu.max")


def cores(limit: Path = _CGROUP) -> int:
    """At least one: those it may run on, at most what its container may use of them.

    Args:
        limit: the container's limit, in the form of cgroup v2 (`MAX PERIOD`); a missing file is none.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        most, period = limit.read_text(encoding="ascii").split()
        return count if most == "max" else max(1, min(count, int(most) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return count
