"""Which processes belong to a test: found by a mark in their environment, whoever started them."""

import contextlib
import os
import uuid
from pathlib import Path

_NAME = "WARMROUTE_TEST_MARK"


class Mark:
    """Give `environment` to a child: it and all that it starts can be found by `alive()`."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex
        self.environment = {**os.environ, _NAME: self._value, "COLUMNS": "120"}

    def alive(self) -> dict[int, str]:
        """Command lines by process id. Zombies have ended."""
        wanted = f"{_NAME}={self._value}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = command
        return found
