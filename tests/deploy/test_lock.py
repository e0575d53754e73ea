import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def lock(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_image_is_pinned_to_what_the_project_asks_for(lock):
    assert lock.problems() == []


def test_every_extra_of_the_image_and_no_host_is_in_the_lock(lock):
    pinned = lock.pins(lock.LOCK)
    assert {"grpcio", "protobuf", "envoy-data-plane", "fastokens", "kubernetes-asyncio"} <= set(pinned)
    for file in (lock.LOCK, lock.BUILD_LOCK):
        assert "://" not in file.read_text()
    docker = (ROOT / "deploy" / "Dockerfile").read_text()
    installs = [line for line in docker.splitlines() if "bin/pip install" in line]
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("grpcio==1.0 \\\n    --hash=sha256:" + "0" * 64, "grpcio 1.0 is not >="),
        ("jinja2==3.1.6", "jinja2 has no hash"),
        ("jinja2 @ https://host/x.whl --hash=sha256:" + "0" * 64, "not an exact version"),
        ("jinja2==3.1.6 --hash=sha256:" + "0" * 64, "protobuf is missing"),
    ],
)
def test_what_a_lock_does_not_do_is_said(lock, tmp_path, monkeypatch, text, problem):
    broken = tmp_path / "requirements.lock"
    broken.write_text(text)
    monkeypatch.setattr(lock, "LOCK", broken)
    assert any(problem in one for one in lock.problems())
