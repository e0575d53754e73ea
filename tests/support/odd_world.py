"""The command `warmroute` in a world whose clocks jump and whose names change: injected, not simulated.

python tests/support/odd_world.py WORLD.json serve -c warmroute.yaml

WORLD.json: {"wall_s": 0, "monotonic_s": 0, "names": {"engines.test": ["127.0.0.2"]}}. Offsets of the clocks
take effect on SIGUSR1. A name that is null fails to resolve, one that is missing is the system's.
"""

import json
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

# As a script: the checkout goes first, its `tests/support` is no place for imports.
sys.path[0] = str(Path(__file__).parents[2])


class World:
    """What the file says."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.wall_s = self.monotonic_s = 0.0
        self.look()

    def look(self) -> None:
        said = self._read()
        self.wall_s, self.monotonic_s = said["wall_s"], said["monotonic_s"]

    def addresses(self, name: str) -> Any:
        """Addresses; None: it cannot be resolved; False: nothing is said of it."""
        return self._read()["names"].get(name, False)

    def _read(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        return said


def main() -> int:
    world = World(Path(sys.argv[1]))
    signal.signal(signal.SIGUSR1, lambda *_: world.look())
    real_time, real_monotonic, real_lookup = time.time, time.monotonic, socket.getaddrinfo

    def lookup(host: Any, port: Any, *args: Any, **fields: Any) -> Any:
        found = world.addresses(host) if isinstance(host, str) else False
        if found is False:
            return real_lookup(host, port, *args, **fields)
        if found is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port or 0)) for ip in found]

    time.time = lambda: real_time() + world.wall_s
    time.monotonic = lambda: real_monotonic() + world.monotonic_s
    socket.getaddrinfo = lookup
    from extproc.cli import main as command

    return command(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
