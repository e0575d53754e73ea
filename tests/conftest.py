"""What holds for all tests.

Tests with processes, sockets or clocks depend on a machine that others use too: one failure in thousands may
be a process that got no core for a second. Such a test has a second try, and the run ends with what failed
in the first: a name that comes back is a race, in the test or in us. Three in a run have one; then, and in
all other tests, a failure is a failure.

With `-n`, processes take a file of tests at a time, so that what a file shares is started once; real vLLM
replicas are shared by all files that use them, and one process runs these.
"""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.envoy import EnvoyFactory

_TESTS = Path(__file__).parent
_USE_THE_MACHINE = {"adapters", "chaos", "cli", "demo", "integration", "loadtests", "test_app.py"}

# Where tests run in the background the shell has SIGINT ignored, and programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines are shared: how long an example takes says nothing.
hypothesis.settings.register_profile("patient", deadline=None)
# A change is judged by the same examples each time; everyone else's runs look for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "patient")


@pytest.fixture
async def start_envoy(tmp_path: Path) -> AsyncIterator[EnvoyFactory]:
    """`await start_envoy(settings)` gives a ready Envoy; all of them end with the test."""
    factory = EnvoyFactory(tmp_path)
    yield factory
    await factory.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(_TESTS).parts[0] in _USE_THE_MACHINE:
            item.add_marker(pytest.mark.flaky(reruns=1))


class FileByFile(LoadScopeScheduling):
    """What one process of `-n` runs in a row."""

    _VLLM = "real vLLM"

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        with_vllm = (
            path for path in _TESTS.rglob("test_*.py") if "pytest.mark.vllm" in path.read_text("utf-8")
        )
        self._with_vllm = {path.relative_to(_TESTS.parent).as_posix() for path in with_vllm}

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return self._VLLM if file in self._with_vllm else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileByFile:
    return FileByFile(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With `WARMROUTE_NO_SKIPS` set, a skipped test fails the run: CI has everything that tests need."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("WARMROUTE_NO_SKIPS") or reporter is None:
        return
    skipped = reporter.stats.get("skipped", [])
    if skipped:
        reporter.write_line("")
        reporter.write_line(f"{len(skipped)} tests were skipped, and WARMROUTE_NO_SKIPS is set:", red=True)
        for report in skipped:
            reporter.write_line(f"  {report.nodeid}: {report.longrepr[2]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
