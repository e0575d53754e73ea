import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest
import yaml

from extproc.adapters import doctor_probe
from extproc.cli import check, main
from extproc.prompt.tiny import tiny_model_path
from tests.support.sim_engine import SimEngine


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(doctor_probe, "_EVENT_WAIT_S", 0.5)
    monkeypatch.setattr(check, "_DISCOVERY_WAIT_S", 0.2)


def config(tmp_path, *engines, model=None, **pool):
    """A configuration file for these engines."""
    static = [{"endpoint": e.endpoint, "kv_events": e.kv_events, "kv_replay": e.kv_replay} for e in engines]
    described = {
        "model": {"path": str(tiny_model_path()), "names": ["tiny"], **(model or {})},
        "discovery": {"static": static},
        **pool,
    }
    path = tmp_path / "warmroute.yaml"
    path.write_text(yaml.safe_dump({"pools": [described]}))
    return str(path)


async def run(*arguments):
    """The command in a thread, while the engines live in this one's event loop."""
    return await asyncio.to_thread(main, ["check", *arguments])


async def test_a_good_setup_passes(tmp_path, capsys):
    async with SimEngine() as one, SimEngine() as two:
        assert await run("-c", config(tmp_path, one, two)) == 0
        out = capsys.readouterr().out
        assert "FAIL" not in out
        assert "warn" not in out
        for word in ("token ids", "KV events", "replay", one.endpoint, two.endpoint, "passed"):
            assert word in out


async def test_a_wrong_tokenizer_fails_and_names_token_ids(tmp_path, capsys):
    wrong = tmp_path / "model"
    shutil.copytree(tiny_model_path(), wrong)
    tokenizer = json.loads((wrong / "tokenizer.json").read_text())
    del tokenizer["model"]["merges"][50:]
    (wrong / "tokenizer.json").write_text(json.dumps(tokenizer))
    async with SimEngine() as engine:
        assert await run("-c", config(tmp_path, engine, model={"path": str(wrong)})) == 1
    out = capsys.readouterr().out
    assert "token ids" in out
    assert "differs from the engine's at position" in out
    assert "`model.path`" in out
    assert "1 of" in out


async def test_json_is_complete_and_alone_on_standard_output(tmp_path, capsys):
    async with SimEngine() as engine:
        assert await run("--json", "-c", config(tmp_path, engine, model={"names": ["other"]})) == 1
    findings = json.loads(capsys.readouterr().out)
    assert {"subject", "check", "status", "detail", "advice"} == set(findings[0])
    failed = [finding for finding in findings if finding["status"] == "fail"]
    assert [finding["check"] for finding in failed] == ["models"]
    assert failed[0]["subject"] == engine.endpoint


async def test_an_engine_that_is_down_fails_and_the_others_are_still_examined(tmp_path, capsys):
    async with SimEngine() as down, SimEngine() as up:
        path = config(tmp_path, down, up)
        await down.kill()
        assert await run("--json", "-c", path) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [f["check"] for f in findings if f["status"] == "fail"] == ["reachable"]
    assert {f["check"] for f in findings if f["subject"] == up.endpoint} >= {"token ids", "replay"}


async def test_addresses_of_events_that_cannot_be_right(tmp_path, capsys):
    async with SimEngine() as engine:
        workers = tmp_path / "workers.yaml"
        workers.write_text(yaml.safe_dump([{"endpoint": engine.endpoint, "kv_events": "tcp://*:0"}]))
        found = {"discovery": {"file": str(workers)}}
        assert await run("--json", "-c", config(tmp_path, **found)) == 1
    failed = [f for f in json.loads(capsys.readouterr().out) if f["status"] == "fail"]
    assert [f["check"] for f in failed] == ["KV events"]
    assert "port 0" in failed[0]["detail"]


async def test_workers_of_every_source_are_examined(tmp_path, capsys, monkeypatch):
    """Not only those of the source that is the first to know its own."""
    monkeypatch.setattr(check, "_DISCOVERY_WAIT_S", 10.0)
    async with SimEngine() as one, SimEngine() as two:
        address, _, port = two.endpoint.rpartition(":")
        assert address == "127.0.0.1"
        static = [{"endpoint": one.endpoint, "kv_events": one.kv_events, "kv_replay": one.kv_replay}]
        found = {"discovery": {"static": static, "dns": {"name": "localhost", "port": int(port)}}}
        await run("--json", "-c", config(tmp_path, **found))
    findings = json.loads(capsys.readouterr().out)
    assert {one.endpoint, two.endpoint} <= {finding["subject"] for finding in findings}


async def test_a_pool_without_a_model_is_a_warning(tmp_path, capsys):
    async with SimEngine() as engine:
        assert await run("--json", "-c", config(tmp_path, engine, model={"path": None})) == 0
    found = {f["check"]: f for f in json.loads(capsys.readouterr().out)}
    assert (found["model"]["status"], found["KV events"]["status"]) == ("warn", "ok")


async def test_a_model_that_cannot_be_loaded_fails_and_the_workers_are_still_examined(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    empty = str(tmp_path / "empty")
    for model in ({"path": "nowhere"}, {"path": empty}, {"revisions": [{"revision": "2", "path": empty}]}):
        async with SimEngine() as engine:
            assert await run("--json", "-c", config(tmp_path, engine, model=model)) == 1
        findings = json.loads(capsys.readouterr().out)
        (failed,) = [f for f in findings if f["status"] == "fail"]
        assert failed["check"] == "model"
        assert "nowhere" in failed["detail"] or "tokenizer.json is missing" in failed["detail"]
        assert failed["advice"]
        assert [f["status"] for f in findings if f["check"] == "KV events"] == ["ok"]


def test_no_workers_found_fails(tmp_path, capsys):
    missing = {"discovery": {"file": str(tmp_path / "workers.yaml")}}
    path = tmp_path / "warmroute.yaml"
    path.write_text(yaml.safe_dump({"pools": [missing]}))
    assert main(["check", "-c", str(path)]) == 1
    out = capsys.readouterr().out
    assert "none found" in out
    assert "workers.yaml" in out


def test_what_cannot_be_checked_is_exit_code_2(tmp_path, capsys):
    path = tmp_path / "warmroute.yaml"
    path.write_text(yaml.safe_dump({"pools": [{"discovery": {}}]}))
    assert main(["check", "-c", str(path)]) == 2
    assert capsys.readouterr().err.startswith("warmroute check: ")
    assert main(["check", "-c", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read" in capsys.readouterr().err


async def test_names_revisions_and_tenants_are_looked_at(tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text("k" * 32)
    async with SimEngine() as engine:
        path = config(tmp_path, engine, model={"revision_from": "models"})
        described = yaml.safe_load((tmp_path / "warmroute.yaml").read_text()) | {
            "aliases": {"best": "tiny", "old": "gone"},
            "tenants": {
                "identity": [{"header": "x-tenant"}],
                "salt_key": {"file": str(key)},
                "policies": {"apart": {"isolation": "salted"}, "lost": {"workers": ["10.9.9.9"]}},
            },
        }
        (tmp_path / "warmroute.yaml").write_text(yaml.safe_dump(described))
        assert await run("--json", "-c", path) == 1
    findings = json.loads(capsys.readouterr().out)
    found = {(f["subject"], f["check"]): f["status"] for f in findings}
    assert found["alias best", "aliases"] == "ok"
    assert found["alias old", "aliases"] == "fail"
    assert found["tenant apart", "tenants"] == "ok"
    assert found["tenant lost", "tenants"] == "fail"
    assert found[engine.endpoint, "isolation"] == "ok"
    assert found["pool default", "revisions"] == "warn"


async def test_the_events_of_an_only_rank_are_looked_for_at_its_port(tmp_path, capsys):
    async with SimEngine(dp_rank=3) as engine:
        path = config(tmp_path, at_rank_0(engine, 3))
        assert await run("-c", path) == 0
    out = capsys.readouterr().out
    assert "data-parallel rank 3" in out
    assert "warn" not in out


def at_rank_0(engine, rank):
    """The engine, with the KV addresses that its configuration has: of rank 0."""

    def address(endpoint):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) - rank}"

    return SimpleNamespace(
        endpoint=engine.endpoint, kv_events=address(engine.kv_events), kv_replay=address(engine.kv_replay)
    )


def keyed(tmp_path, engine, key=None):
    """A configuration with a salted tenant, whose check asks an engine the most."""
    pool = {}
    if key is not None:
        (tmp_path / "engine.key").write_text(key)
        pool["api_key_file"] = "engine.key"
    path = config(tmp_path, engine, **pool)
    (tmp_path / "salt.key").write_text("k" * 32)
    described = yaml.safe_load((tmp_path / "warmroute.yaml").read_text()) | {
        "aliases": {"best": "tiny"},
        "tenants": {
            "identity": [{"header": "x-tenant"}],
            "salt_key": {"file": "salt.key"},
            "unknown": {"isolation": "salted"},
        },
    }
    (tmp_path / "warmroute.yaml").write_text(yaml.safe_dump(described))
    return path


async def test_engines_that_ask_for_a_key_are_examined_with_it(tmp_path, capsys):
    async with SimEngine(api_keys=("a-secret",)) as engine:
        assert await run("-c", keyed(tmp_path, engine, "a-secret\n")) == 0
    out = capsys.readouterr().out
    assert "warn" not in out
    for word in ("token ids", "KV events", "cached tokens", "isolation", "alias best"):
        assert word in out
    assert "a-secret" not in out


@pytest.mark.parametrize(("key", "says"), [(None, "we have none"), ("a-secret", "does not take the key")])
async def test_a_key_that_is_missing_or_wrong_is_a_finding_that_names_the_setting(
    tmp_path, capsys, key, says
):
    async with SimEngine(api_keys=("another",)) as engine:
        assert await run("--json", "-c", keyed(tmp_path, engine, key)) == 1
    out = capsys.readouterr().out
    assert "a-secret" not in out
    (failed,) = [f for f in json.loads(out) if f["status"] == "fail"]
    assert (failed["subject"], failed["check"]) == (engine.endpoint, "models")
    assert says in failed["detail"]
    assert "`api_key_file`" in failed["detail"] + failed["advice"]


def test_a_key_that_cannot_be_read_is_exit_code_2(tmp_path, capsys):
    path = tmp_path / "warmroute.yaml"
    path.write_text(yaml.safe_dump({"pools": [{"discovery": {"static": ["h:1"]}, "api_key_file": "gone"}]}))
    assert main(["check", "-c", str(path)]) == 2
    assert f"pools.0.api_key_file: cannot read {tmp_path / 'gone'}" in capsys.readouterr().err
