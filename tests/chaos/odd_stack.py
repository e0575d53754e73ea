"""A fleet in an odd world (see `tests.support.odd_world`): found by a name, its router's clocks injected."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.chaos.stack import ENGINE, ROUTER_S, ChaosStack
from tests.support import odd_world
from tests.support.engine_process import EngineProcess
from tests.support.ports import free_ports

NAME = "engines.chaos.test"


class World:
    """What the router believes of time and names."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "world.json"
        self._said: dict[str, Any] = {"wall_s": 0.0, "monotonic_s": 0.0, "names": {}}
        self.say()
        self.program = (sys.executable, str(Path(odd_world.__file__)), str(self._file))

    def say(self, **news: Any) -> None:
        """Clocks take effect on SIGUSR1, names at once."""
        self._said |= news
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._said))
        new.replace(self._file)


class OddStack(ChaosStack):
    """Three engines on one port of three addresses, found by their name alone. `hosts` are all of them."""

    def __init__(self, directory: Path) -> None:
        self.world = World(directory)
        self.passed_s = 0.0  # that its monotonic clock has jumped so far
        ports = free_ports(3)
        self.hosts = [f"127.0.0.{n}" for n in (1, 2, 3)]
        self.resolve_to(self.hosts)
        super().__init__(
            directory,
            engines=[
                EngineProcess(directory, f"engine-{host}", *ENGINE, host=host, ports=(*ports,))
                for host in self.hosts
            ],
            program=self.world.program,
            settings={"envoy": {"message_timeout_s": ROUTER_S, "eds": "always"}},
            pool={
                "discovery": {"dns": {"name": NAME, "port": ports[0], "interval_s": 0.1}},
                "kv_events": {"endpoint": f"tcp://*:{ports[1]}", "replay": f"tcp://*:{ports[2]}"},
            },
        )

    def resolve_to(self, hosts: list[str] | None) -> None:
        """What the name of the engines means; None: it cannot be resolved."""
        self.world.say(names={NAME: hosts})
