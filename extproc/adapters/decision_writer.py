"""Writes the decision log, and keeps its last lines in memory.

Writing may fail (disk full, closed pipe); that is counted and said once, and never reaches the request.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from extproc.adapters.decision_log import record
from extproc.adapters.recent_decisions import RecentDecisions
from extproc.adapters.rotating_file import RotatingFile
from extproc.core.outcomes import Released
from extproc.core.types import Outcome

REDACTED = "[redacted]"
_ENCODER = msgspec.json.Encoder()


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
    """

    def __init__(
        self,
        path: str,
        on_error: Callable[[str], None],
        settings: LogSettings | None = None,
        recent: RecentDecisions | None = None,
    ) -> None:
        self._path = path
        self._on_error = on_error
        self._settings = settings or LogSettings()
        self.recent = recent
        self._failing = False
        self.failures = 0
        self._file: RotatingFile | None = None
        if path not in ("", "-"):
            with contextlib.suppress(OSError):  # said when the first line is lost
                self._open()

    def write(self, released: Released) -> None:
        """Append the line for `released`."""
        if not self._path and self.recent is None:
            return
        entry = record(released, datetime.now(UTC))
        request_id = entry["request_id"]
        share = 1.0 if _always(entry) else self._settings.sample
        if share < 1.0:
            entry["sample"] = share
        line = _ENCODER.encode(self.hide(entry))
        if self.recent is not None:
            self.recent.add(request_id, entry, line)
        if self._path and _falls_in(request_id, share):
            self._append(line + b"\n")

    def hide(self, entry: dict[str, Any]) -> dict[str, Any]:
        """`entry` as it may be shown."""
        hidden = {name: REDACTED for name in self._settings.redact if entry.get(name) is not None}
        return entry | hidden

    def close(self) -> None:
        """Close the file, if it is ours."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _append(self, data: bytes) -> None:
        try:
            if self._path == "-":
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
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
