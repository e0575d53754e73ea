import os
import subprocess
import sys

import pytest

from loadtests.live import priority
from loadtests.live.priority import PriorityError, descendants, prefer

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def child():
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate()


def test_who_was_started_is_found(child):
    assert child.pid in descendants(os.getpid())
    assert os.getpid() not in descendants(child.pid)


def test_threads_go_first_and_those_that_have_ended_are_passed_over(child, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda thread, policy, param: asked.update({thread: policy})
    )
    prefer({child.pid, os.getpid(), 2**22 + 1})
    assert asked[child.pid] == os.SCHED_RR
    assert (
        asked[os.getpid()] == os.SCHED_RR | os.SCHED_RESET_ON_FORK
    )  # engines started later do not inherit it


def test_who_may_not_is_told_what_is_needed(child, monkeypatch):
    def refuse(thread, policy, param):
        raise PermissionError

    monkeypatch.setattr(priority.os, "sched_setscheduler", refuse)
    with pytest.raises(PriorityError, match="CAP_SYS_NICE"):
        prefer({child.pid})
