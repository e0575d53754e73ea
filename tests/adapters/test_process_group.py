import asyncio
import os
import signal
import socket
import sys

import pytest

from extproc.adapters import process_group
from extproc.adapters.process_group import ProcessGroup, ProcessPlace, port_of, reserve
from extproc.core.errors import WarmrouteError
from tests.support.waiting import until

RUN = """
import pathlib, signal, sys, time
folder, number = pathlib.Path(sys.argv[1]), sys.argv[2]
with (folder / f"started-{number}").open("a") as file:
    file.write(f"{__import__('os').getpid()}\\n")
%s
"""
WAIT = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("line " + number, flush=True)
time.sleep(600)
"""


class Group:
    def __init__(self, folder, body=WAIT, count=2, **settings):
        self.folder, self.said, self.places = folder, [], {}

        def command(place):
            self.places[place.number] = place
            return [sys.executable, "-c", RUN % body, str(folder), str(place.number)]

        self.group = ProcessGroup(command, count, self.said.append, **settings)

    def starts(self, number):
        file = self.folder / f"started-{number}"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    async def __aenter__(self):
        self.task = asyncio.create_task(self.group.run())
        return self

    async def __aexit__(self, *_):
        self.group.stop()
        async with asyncio.timeout(30):
            self.code = await self.task


async def test_all_are_started_and_stopped_in_order(tmp_path, capfdbinary):
    async with Group(tmp_path) as it:
        await until(lambda: it.starts(0) and it.starts(1))
        place = it.places[1]
        assert place.folder.stat().st_mode & 0o777 == 0o700
        await until(lambda: b"line" in capfdbinary.readouterr().out)
    assert it.code == 0
    assert it.said == []
    assert not place.folder.exists()


async def test_one_that_dies_is_started_again_and_the_others_are_left_alone(tmp_path):
    async with Group(tmp_path) as it:
        await until(lambda: it.starts(0) and it.starts(1))
        os.kill(it.starts(0)[0], signal.SIGKILL)
        await until(lambda: len(it.starts(0)) == 2)
        assert len(it.starts(1)) == 1
        assert "process 0 ended with code -9" in it.said[0]
        os.kill(it.starts(1)[0], 0)


async def test_one_that_refuses_its_configuration_ends_all(tmp_path):
    async with Group(tmp_path, "sys.exit(2) if number == '1' else time.sleep(600)") as it:
        async with asyncio.timeout(20):
            await it.task
    assert it.code == 2


async def test_one_that_does_not_stop_is_killed(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    async with Group(tmp_path, stubborn, 1, grace_s=0.3) as it:
        await until(lambda: it.starts(0))
    assert it.code == 0


async def test_one_that_keeps_dying_is_not_started_all_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "_FIRST_PAUSE_S", 0.001)
    async with Group(tmp_path, "sys.exit(3)", 1) as it:
        await until(lambda: len(it.said) >= 4)
    pauses = [float(line.rpartition(" in ")[2].split()[0]) for line in it.said]
    assert pauses == sorted(pauses)


def test_the_shared_port_is_held_and_cannot_be_anothers():
    held, listen = reserve("127.0.0.1:0")
    with held:
        port = int(listen.rpartition(":")[2])
        with socket.socket() as sharing:
            sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sharing.bind(("127.0.0.1", port))
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            with pytest.raises(WarmrouteError, match="is the port in use"):
                reserve(f"127.0.0.1:{listening.getsockname()[1]}")


def test_ports_of_processes_follow_each_other():
    assert [port_of("0.0.0.0:50051", n) for n in (0, 2)] == ["0.0.0.0:50051", "0.0.0.0:50053"]
    assert port_of("[::]:9000", 1) == "[::]:9001"
    assert (port_of("", 3), port_of("127.0.0.1:0", 3)) == ("", "127.0.0.1:0")


def test_siblings_are_all_others():
    place = ProcessPlace(1, 3, "/run/x")
    assert place.siblings == ("unix:/run/x/peer-0.sock", "unix:/run/x/peer-2.sock")
    assert ProcessPlace().siblings == ()


async def test_nobody_who_reads_is_no_reason_to_leave_processes_alone(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        async with Group(tmp_path, count=1) as it:
            await until(lambda: it.starts(0))
            os.kill(it.starts(0)[0], signal.SIGKILL)
            await until(lambda: len(it.starts(0)) == 2)
    assert it.code == 0


async def test_a_process_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(process_group, "_FIRST_PAUSE_S", 0.001)
    start, failures = asyncio.create_subprocess_exec, iter([OSError(24, "Too many open files")])

    async def sometimes(*args, **options):
        for error in failures:
            raise error
        return await start(*args, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", sometimes)
    async with Group(tmp_path, count=1) as it:
        await until(lambda: it.starts(0))
    assert it.said[0] == "process 0 cannot be started: Too many open files"
