"""Writes the decision log, and keeps its last lines in memory.

Writing may fail (disk full, closed pipe); that is counted and said once, and never reaches the request.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from extproc.adapters.decision_log import record
from extproc.adapters.deferred import Deferred
from extproc.adapters.holding import Wait
from extproc.adapters.line_output import LineOutput
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.adapters.rotating_file import RotatingFile
from extproc.adapters.unserved_log import unserved_record
from extproc.core.outcomes import Released
from extproc.core.types import Outcome

REDACTED = "[redacted]"
_ENCODER = msgspec.json.Encoder()
_LAST_S = 1.0


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is written, and where it stops.

    Attributes:
        sample: share of requests that are written, 0 to 1; the same for every process that sees the same
            request. Those that did not just finish, or lost a warm worker to a long queue, always are.
        redact: fields whose values are hidden.
        max_bytes: a larger file is rotated; 0: never.
        keep: how many rotated files remain.
    """

    sample: float = 1.0
    redact: frozenset[str] = frozenset()
    max_bytes: int = 0
    keep: int = 3


class DecisionLog:
    """Writes records to a file (appending) or to standard output, and keeps the last ones in memory.

    Args:
        path: a file; `-` for standard output; empty for nowhere.
        on_error: told once when writing starts to fail, with what to do about it.
        settings: what is written.
        recent: where every line is kept too, sampled or not; None: nowhere.
        later: puts writing off, so that no request waits for it; None: lines are written at once.
    """

    def __init__(
        self,
        path: str,
        on_error: Callable[[str], None],
        settings: LogSettings | None = None,
        recent: RecentDecisions | None = None,
        later: Deferred | None = None,
    ) -> None:
        self._path = path
        self._on_error = on_error
        self._settings = settings or LogSettings()
        self.recent = recent
        self._later = later
        self._failing = False
        self.failures = 0
        self._file: RotatingFile | None = None
        self._output = LineOutput(lambda: sys.stdout)
        if path not in ("", "-"):
            with contextlib.suppress(OSError):  # said when the first line is lost
                self._open()

    def write(self, released: Released) -> None:
        """Append the line for `released`."""
        if not self._path and self.recent is None:
            return
        finished_at = datetime.now(UTC)
        if self._later is None:
            self._write(released, finished_at)
        else:
            self._later.add(partial(self._write, released, finished_at))

    def _write(self, released: Released, finished_at: datetime) -> None:
        entry = record(released, finished_at)
        request_id = entry["request_id"]
        share = 1.0 if _always(entry) else self._settings.sample
        if share < 1.0:
            entry["sample"] = share
        line = _ENCODER.encode(self.hide(entry))
        if self.recent is not None:
            self.recent.add(request_id, entry, line)
        if self._path and _falls_in(request_id, share):
            self._append(line + b"\n")

    def write_unserved(self, wait: Wait) -> None:
        """Append the line for a request that was held and not served. It is always written."""
        if not self._path and self.recent is None:
            return
        at = datetime.now(UTC)
        if self._later is None:
            self._write_unserved(wait, at)
        else:
            self._later.add(partial(self._write_unserved, wait, at))

    def _write_unserved(self, wait: Wait, at: datetime) -> None:
        line = _ENCODER.encode(self.hide(unserved_record(wait, at)))
        if self.recent is not None:
            self.recent.add_unserved(wait.request.request_id, line)
        if self._path:
            self._append(line + b"\n")

    def hide(self, entry: dict[str, Any]) -> dict[str, Any]:
        """`entry` as it may be shown."""
        if not self._settings.redact:
            return entry
        names = self._settings.redact
        if "model" in names:
            names |= {"alias"}  # what the client called it
        hidden = {name: REDACTED for name in names if entry.get(name) is not None}
        return entry | hidden

    def close(self) -> None:
        """Write what was put off, and close the file, if it is ours.

        Lines that had no room have `_LAST_S` to find some; what is left is counted, and said.
        """
        if self._later is not None:
            self._later.flush()
        self.flush(_LAST_S)
        left = self._output.flush()
        if left:
            self.failures += left
            self._on_error(f"decision log {self._path}: nobody reads it; the last {left} lines are lost")
        if self._file is not None:
            self._file.close()
        self._file = None

    def flush(self, wait_s: float = 0.0) -> None:
        """Write lines for which there was no room before; wait so long for some."""
        try:
            self._output.flush(wait_s)
        except (OSError, ValueError) as error:
            self._failed(error)

    def _append(self, data: bytes) -> None:
        try:
            if self._path == "-":
                self._output.write(data)
            else:
                self._open().write(data)
        except (OSError, ValueError) as error:
            self._failed(error)
        else:
            self._failing = False

    def _open(self) -> RotatingFile:
        if self._file is None:
            self._file = RotatingFile(Path(self._path), self._settings.max_bytes, self._settings.keep)
        return self._file

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if not self._failing:
            self._failing = True
            self._on_error(
                f"decision log {self._path}: {error}; requests go on, lines are lost until it can be written"
            )


def _always(entry: Mapping[str, Any]) -> bool:
    return entry["outcome"] != Outcome.FINISHED.value or str(entry["decision"]).startswith("warm-denied")


def _falls_in(request_id: str, share: float) -> bool:
    """Whether the request is among the `share` that is written."""
    if share >= 1.0:
        return True
    return xxhash.xxh3_64_intdigest(request_id.encode("utf-8", "surrogatepass")) < share * 2**64
