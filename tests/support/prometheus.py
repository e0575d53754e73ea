"""A real Prometheus, and its promtool.

    async with Prometheus(directory, {"router": address}, rules) as prometheus:
        await prometheus.query("up")                    # the samples: [({labels}, value), ...]
        await prometheus.firing()                       # names of alerts that fire

`WARMROUTE_PROMETHEUS_DIR` names the folder `.ci/install-prometheus.sh` has made; else they are on the PATH.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import pytest
import yaml

from extproc.adapters.child_process import ChildProcess
from tests.support.ports import free_port

INTERVAL = "500ms"
DEADLINE_S = 60.0
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "warmroute-alerts.yaml"


def require(program: str) -> str:
    """The path of `prometheus` or `promtool`, or skip with the reason."""
    folder = os.environ.get("WARMROUTE_PROMETHEUS_DIR")
    found = shutil.which(program, path=folder) if folder else shutil.which(program)
    if found is None:
        pytest.skip(
            f"no {program}: install it with `.ci/install-prometheus.sh DIR` and set WARMROUTE_PROMETHEUS_DIR"
        )
    return found


class Prometheus:
    """Scrapes `targets` (job to addresses) and evaluates `rules` twice a second."""

    def __init__(
        self, directory: Path, targets: Mapping[str, list[str]], rules: Mapping[str, Any] | None = None
    ) -> None:
        self._directory = directory / "prometheus"
        self._targets = targets
        self._rules = rules
        self._url = f"http://127.0.0.1:{free_port()}"
        self._process: ChildProcess
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        program = require("prometheus")
        self._directory.mkdir()
        config = {
            "global": {
                "scrape_interval": INTERVAL,
                "scrape_timeout": INTERVAL,
                "evaluation_interval": INTERVAL,
            },
            "rule_files": ["rules.yaml"] if self._rules is not None else [],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": addresses}]}
                for job, addresses in self._targets.items()
            ],
        }
        (self._directory / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        if self._rules is not None:
            (self._directory / "rules.yaml").write_text(yaml.safe_dump(self._rules), encoding="utf-8")
        command = [
            program,
            f"--config.file={self._directory / 'config.yaml'}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--web.listen-address={self._url.removeprefix('http://')}",
            "--log.level=warn",
        ]
        self._process = ChildProcess(command, self._directory / "log")
        self._session = aiohttp.ClientSession(self._url)
        await self._process.start()
        await self.until(self._ready, "Prometheus to be ready")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        await self._process.stop()

    async def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """An instant query."""
        answer = await self._get("/api/v1/query", query=expression)
        return [(sample["metric"], float(sample["value"][1])) for sample in answer["result"]]

    async def series(self, name: str) -> list[dict[str, str]]:
        """Labels of every series of this name."""
        return list(await self._get("/api/v1/series", **{"match[]": f'{{__name__="{name}"}}'}))

    async def alerts(self) -> list[dict[str, Any]]:
        """Alerts that are pending or fire."""
        return list((await self._get("/api/v1/alerts"))["alerts"])

    async def firing(self) -> set[str]:
        """Names of alerts that fire."""
        return {a["labels"]["alertname"] for a in await self.alerts() if a["state"] == "firing"}

    async def until(
        self, condition: Callable[[], Awaitable[object]], what: str, deadline_s: float = DEADLINE_S
    ) -> None:
        """Wait until `condition` holds."""
        end = time.monotonic() + deadline_s
        while not await condition():
            assert time.monotonic() < end, f"not within {deadline_s} s: {what}\n{self._process.log_tail()}"
            await asyncio.sleep(0.1)

    async def _ready(self) -> bool:
        assert self._process.running, self._process.log_tail()
        try:
            async with self._session.get("/-/ready") as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    async def _get(self, path: str, **query: str) -> Any:
        async with self._session.get(path, params=query) as reply:
            answer = await reply.json()
        assert answer["status"] == "success", (query, answer)
        return answer["data"]
