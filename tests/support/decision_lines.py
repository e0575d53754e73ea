"""A decision log that is being written, read as it grows."""

import json
import os
from pathlib import Path
from typing import Any


class DecisionLines:
    """What is in one file so far. It may not be there yet, and may begin anew (rotation, another file)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None  # which one it is
        self._read = 0  # bytes
        self._entries: dict[str, dict[str, Any]] = {}

    def entries(self) -> dict[str, dict[str, Any]]:
        """Lines by request id. What else is said in between, where both go into one file, is left out."""
        if not self.path.exists():
            return {}
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._read:
                self._file, self._read, self._entries = (status.st_dev, status.st_ino), 0, {}
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        for line in text.splitlines():
            if line.startswith(b"{"):
                entry = json.loads(line)
                self._entries[entry["request_id"]] = entry
        return dict(self._entries)
