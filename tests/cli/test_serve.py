import asyncio
import json
import signal
import socket
import sys

import grpc
import pytest
import yaml

from extproc.adapters.child_process import ChildProcess
from extproc.cli import main
from extproc.pb import health_pb2
from tests.support.ports import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(90)

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def config(tmp_path):
    def write(**settings):
        pool = {"discovery": {"static": [f"127.0.0.1:{free_port()}"]}, "kv_events": {"enabled": False}}
        path = tmp_path / "warmroute.yaml"
        path.write_text(yaml.safe_dump({"listen": "127.0.0.1:0", "pools": [pool], **settings}))
        return str(path)

    return write


async def started(child):
    await child.start()
    await until(lambda: "listening on" in child.log_tail() or not child.running, 60)
    assert child.running, child.log_tail()
    line = next(line for line in child.log_tail().splitlines() if "listening on" in line)
    return line.rpartition(" ")[2]


async def health(address, service):
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        return (await call(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_until_it_is_asked_to_stop(config, tmp_path, number):
    command = [sys.executable, "-m", "extproc", "serve", "-c", config(), "--policy", "round-robin"]
    child = ChildProcess(command, tmp_path / "log")
    try:
        address = await started(child)
        assert await health(address, "liveness") == SERVING
        process = child._process
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        await child.kill()
    assert "stopping" in child.log_tail()
    assert "Traceback" not in child.log_tail()


async def test_options_come_before_the_file(config, tmp_path):
    port = free_port()
    path = config(listen="127.0.0.1:1")
    command = [sys.executable, "-m", "extproc", "serve", "-c", path, "--listen", f"127.0.0.1:{port}"]
    async with ChildProcess(command, tmp_path / "log") as child:
        await until(lambda: f"listening on 127.0.0.1:{port}" in child.log_tail(), 60)


def test_a_port_in_use_is_exit_code_2_that_names_it(config, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["serve", "-c", config(), "--listen", address]) == 2
    err = capsys.readouterr().err
    assert f"warmroute serve: cannot listen on {address}" in err


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_exit_code_2(config, capsys, listen):
    assert main(["serve", "-c", config(), "--listen", listen]) == 2
    (said,) = capsys.readouterr().err.splitlines()  # and nothing was begun before
    assert listen in said


def test_a_model_that_cannot_be_loaded_is_exit_code_2(config, tmp_path, capsys):
    static = {"discovery": {"static": ["127.0.0.1:1"]}}
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text(json.dumps({"model": 5}))
    for folder in ("missing", "empty", "broken"):
        path = config(pools=[{**static, "model": {"path": folder}}])
        assert main(["serve", "-c", path]) == 2
        err = capsys.readouterr().err
        assert folder in err
        assert "Traceback" not in err
