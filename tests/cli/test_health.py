import asyncio

from aiohttp import web

from extproc.cli import main
from tests.support.grpc_host import RecordingRouting, running
from tests.support.http import Upstream
from tests.support.ports import free_port


async def ask(*arguments):
    return await asyncio.to_thread(main, ["health", *arguments])


async def test_readiness_and_liveness(tmp_path, capsys):
    async with running(RecordingRouting()) as host:
        where = ("--address", host.server.address)
        assert await ask(*where) == 1
        assert capsys.readouterr().out == "readiness: NOT_SERVING\n"
        assert await ask(*where, "--service", "liveness") == 0
        host.health.set_ready(True)
        assert await ask(*where) == 0
        config = tmp_path / "warmroute.yaml"
        pools = "pools: [{discovery: {static: [10.0.0.1:8000]}}]"
        config.write_text(f"listen: 0.0.0.0:{host.server.port}\n{pools}\n")
        assert await ask("-c", str(config)) == 0
        assert capsys.readouterr().out.endswith("readiness: SERVING\n")


def test_nobody_there_is_not_healthy(capsys):
    """Exit code 1: health checks of containers reserve 2."""
    address = f"127.0.0.1:{free_port()}"
    assert main(["health", "--address", address, "--timeout", "1"]) == 1
    assert f"readiness: no answer from {address}" in capsys.readouterr().err


def test_an_address_that_is_none_cannot_be_asked(capsys):
    assert main(["health", "--address", "nowhere"]) == 2
    assert "'nowhere' is not an address" in capsys.readouterr().err


async def test_with_tls_the_admin_server_is_asked(tmp_path, capsys):
    status = {"/livez": 200, "/readyz": 503}

    async def answer(request, _received):
        return web.Response(status=status[request.path])

    async with Upstream(answer) as admin:
        config = tmp_path / "warmroute.yaml"
        tls = "tls: {certificate: cert.pem, key: key.pem}"
        pools = "pools: [{discovery: {static: [10.0.0.1:8000]}}]"
        config.write_text(f"admin: {{listen: '{admin.endpoint}'}}\n{tls}\n{pools}\n")
        assert await ask("-c", str(config), "--service", "liveness") == 0
        assert await ask("-c", str(config)) == 1
        assert capsys.readouterr().out == "liveness: SERVING\nreadiness: NOT_SERVING\n"
        config.write_text(f"admin: {{listen: ''}}\n{tls}\n{pools}\n")
        assert await ask("-c", str(config)) == 2
        assert "set `admin.listen`" in capsys.readouterr().err
    config.write_text(f"admin: {{listen: '127.0.0.1:{free_port()}'}}\n{tls}\n{pools}\n")
    assert await ask("-c", str(config)) == 1
    assert "no answer from 127.0.0.1" in capsys.readouterr().err
