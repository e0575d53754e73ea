"""A real vLLM that was started with `--api-key`: what it asks a key for is what we send one for."""

import asyncio
import json

import aiohttp
import pytest
import yaml

from extproc.adapters.engine_key import GUARDED, EngineKey
from extproc.adapters.worker_tokenizer import WorkerTokenizer, WorkerTokenizerError
from extproc.cli import main
from extproc.protocol.openai import parse_request
from tests.support.vllm import ReplicaSpec
from tests.support.waiting import until
from tests.test_app import Running, settings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KEY = "the-key-of-the-engine"


async def test_with_its_key_it_is_known_and_passes_the_check_and_without_it_says_so(
    vllm_pool, tmp_path, capsys
):
    (replica,) = vllm_pool.start(ReplicaSpec(extra_args=("--api-key", KEY, "--enable-scale-out")))
    file = tmp_path / "engine.key"
    file.write_text("wrong\n")
    guarded = [prefix for prefix in GUARDED if replica.request("GET", f"{prefix}/models")[0] == 401]
    assert guarded == list(GUARDED)
    for path in ("/metrics", "/health", "/version"):
        assert replica.request("GET", path)[0] == 200

    pool = {"api_key_file": str(file)}
    often = {"scrape": {"models_interval_s": 0.2}}
    config = settings(tmp_path, replica, pool=pool, **often)
    async with Running(config) as app:
        await until(app.says(replica.endpoint, "/v1/models answers 401", "`api_key_file`"))
        assert app.admission.catalog.names("default") == ()
        file.write_text(KEY)
        await until(app.says(replica.endpoint, "/v1/models can be read now"))
        assert app.admission.catalog.names("default") == ("tiny",)
        assert app.health.ready

    request = parse_request("POST", "/v1/completions", {}, b'{"model": "tiny", "prompt": "Hello, world!"}')
    async with aiohttp.ClientSession() as session:
        for key, outcome in ((None, "answered 401"), (EngineKey(file), None)):
            tokenizer = WorkerTokenizer(session, lambda: replica.base_url, "render", key)
            if outcome is None:
                assert len((await tokenizer.encode(request, timeout_s=60)).prompts[0]) > 1
            else:
                with pytest.raises(WorkerTokenizerError, match=outcome):
                    await tokenizer.encode(request, timeout_s=60)

    path = tmp_path / "warmroute.yaml"
    for key, code in ((KEY, 0), ("wrong", 1)):
        file.write_text(key)
        path.write_text(yaml.safe_dump({"pools": [config.pools[0].model_dump(mode="json")]}))
        assert await asyncio.to_thread(main, ["check", "--json", "-c", str(path)]) == code
        findings = json.loads(capsys.readouterr().out)
        assert [f["check"] for f in findings if f["status"] == "fail"] == ["models"] * code
    replica.kill()
