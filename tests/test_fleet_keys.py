"""Engines that ask for a key (vLLM's --api-key), as a running router meets them."""

import dataclasses
import json
import shutil

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc import config as configuration
from extproc.adapters.metrics_scraper import MODELS_PATH
from extproc.adapters.routing import HttpRequest
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.ext_proc_messages import Route
from tests.adapters.test_metrics_scraper import PAGE
from tests.support.http import Upstream
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until, until_told
from tests.test_app import Running, settings

KEY = "the-key-of-the-engines"
OFTEN = {"scrape": {"interval_s": 0.05, "models_interval_s": 0.1}}
ADAPTERS = {"served_model_names": ("tiny",), "adapters": ("sql",)}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "engine.key"
    path.write_text(KEY + "\n")
    return path


def about(app, engine):
    return [line for line in app.said if engine.endpoint in line and "/v1/models" in line]


async def state(app):
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://{app.admin.address}/state") as reply,
    ):
        return await reply.json()


async def warned(app):
    return [one for one in (await state(app))["warnings"] if "/v1/models" in one["text"]]


async def test_names_and_adapters_become_known_and_the_key_is_nowhere_to_be_seen(tmp_path, key_file, caplog):
    caplog.set_level("DEBUG")
    journal = tmp_path / "journal"
    async with SimEngine(api_keys=(KEY,), **ADAPTERS) as engine:
        config = settings(
            tmp_path,
            engine,
            pool={"api_key_file": str(key_file)},
            admin={"listen": "127.0.0.1:0"},
            journal={"path": str(journal)},
            **OFTEN,
        )
        async with Running(config) as app:
            await until(lambda: app.admission.catalog.names("default") == ("tiny", "sql"))
            assert isinstance(await app.ask(model="sql"), Route)
            assert await warned(app) == []
            shown = [json.dumps(await state(app)), *app.said, caplog.text, repr(app.config)]
            shown.append(app.config.model_dump_json())
        assert about(app, engine) == []
    shown += [path.read_bytes().decode(errors="replace") for path in tmp_path.iterdir() if path != key_file]
    assert len(shown) > 5
    assert not [text for text in shown if KEY in text]


async def test_without_it_they_are_not_known_and_that_is_said_once(tmp_path):
    async with SimEngine(api_keys=(KEY,), **ADAPTERS) as engine:
        config = settings(tmp_path, engine, admin={"listen": "127.0.0.1:0"}, **OFTEN)
        async with Running(config) as app:
            looks = counted(app, engine)
            await until(lambda: len(looks) >= 4)
            assert not app.admission.catalog.names("default")
            (line,) = about(app, engine)
            assert "answers 401" in line
            assert "`api_key_file`" in line
            assert "adapters" in line
            (warning,) = await warned(app)
            assert (warning["subject"], warning["severity"]) == (engine.endpoint, "odd")
            assert "`api_key_file`" in warning["cause"]
            # It is started again, and asks no more.
            engine.server.settings = dataclasses.replace(engine.server.settings, api_keys=())
            await engine.restart()
            await until(app.says(engine.endpoint, "/v1/models can be read now"))
            assert app.admission.catalog.names("default") == ("tiny", "sql")
            await until_told(lambda: warned(app), lambda found: not found)


def counted(app, engine):
    """Grows with every look at the engine's models."""
    looks = []
    original = app._watch._scraper._on_refusal

    def on_refusal(endpoint, why):
        looks.append(endpoint)
        original(endpoint, why)

    app._watch._scraper._on_refusal = on_refusal
    return looks


async def test_a_key_that_changes_is_read_again_without_a_restart(tmp_path, key_file):
    async with SimEngine(api_keys=(KEY,), **ADAPTERS) as engine:
        config = settings(tmp_path, engine, pool={"api_key_file": str(key_file)}, **OFTEN)
        async with Running(config) as app:
            await until(lambda: app.admission.catalog.names("default") == ("tiny", "sql"))
            engine.server.settings = dataclasses.replace(
                engine.server.settings, api_keys=("another",), adapters=("sql", "more")
            )
            await engine.restart()
            await until(app.says(engine.endpoint, "does not take the key in `api_key_file`", str(key_file)))
            key_file.write_text("another")
            await until(app.says(engine.endpoint, "/v1/models can be read now"))
            assert "more" in app.admission.catalog.names("default")
            assert len(about(app, engine)) == 2


class Engine(Upstream):
    """Has metrics, and one model."""

    async def _respond(self, request, received):
        if request.path.startswith("/metrics"):
            return web.Response(body=PAGE)
        if request.path.endswith("/render"):
            return web.json_response({"token_ids": [5, 6, 7]})
        return web.json_response({"data": [{"id": "tiny"}]})

    def __init__(self):
        super().__init__(self._respond)

    def authorizations(self):
        """What was sent as authorization, by path."""
        found = {}
        for one in self.requests:
            found.setdefault(one.path, set()).add(one.headers.get("authorization"))
        return found


async def test_a_pools_key_goes_to_its_workers_only_and_with_no_other_question(tmp_path):
    async with Engine() as one, Engine() as two, Engine() as open_:
        pools = []
        for name, engine in (("a", one), ("b", two), ("c", open_)):
            pool = {
                "name": name,
                "discovery": {"static": [engine.endpoint]},
                "kv_events": {"enabled": False},
            }
            if engine is not open_:
                (tmp_path / name).write_text(f"key-of-{name}")
                pool["api_key_file"] = str(tmp_path / name)
            pools.append(pool)
        given = {"listen": "127.0.0.1:0", "pools": pools, "admin": {"listen": ""}, **OFTEN}
        config = configuration.parse(yaml.safe_dump(given))
        async with Running(config) as app:
            for engine in (one, two, open_):
                await until(
                    lambda engine=engine: len(engine.requests) >= 8 and MODELS_PATH in engine.authorizations()
                )
            app._watch.look_at_models()
            await until(lambda: not app._watch._scraper._asked)
        for engine, sent in ((one, "Bearer key-of-a"), (two, "Bearer key-of-b"), (open_, None)):
            found = engine.authorizations()
            assert found.pop(MODELS_PATH) == {sent}
            assert set().union(*found.values()) == {None}


async def test_a_worker_that_is_asked_to_render_gets_the_key(tmp_path, key_file):
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path(), model)
    described = json.loads((model / "tokenizer_config.json").read_text())
    del described["chat_template"]  # so that no chat is rendered here
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    async with Engine() as engine:
        pool = {
            "model": {"path": str(model), "names": ["tiny"], "worker_tokenize": "render"},
            "discovery": {"static": [engine.endpoint]},
            "kv_events": {"enabled": False},
            "api_key_file": str(key_file),
        }
        async with Running(settings(tmp_path, pool=pool, admin={"listen": ""}, **OFTEN)) as app:
            path = "/v1/chat/completions"
            body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]})
            route = await app.service.route(HttpRequest("POST", path, {}, body.encode(), None, None, "r"))
            assert isinstance(route, Route)
        assert engine.authorizations()[f"{path}/render"] == {f"Bearer {KEY}"}


async def test_a_worker_that_left_is_not_warned_of(tmp_path):
    workers = tmp_path / "workers.yaml"
    async with SimEngine(api_keys=(KEY,)) as one, SimEngine(api_keys=(KEY,)) as two:
        workers.write_text(yaml.safe_dump([one.endpoint, two.endpoint]))
        config = settings(
            tmp_path,
            pool={"discovery": {"file": str(workers)}, "kv_events": {"enabled": False}},
            admin={"listen": "127.0.0.1:0"},
            **OFTEN,
        )
        async with Running(config) as app:
            await until(lambda: about(app, one) and about(app, two))
            workers.write_text(yaml.safe_dump([two.endpoint]))
            await until(app.says(one.endpoint, "left"))
            (warning,) = await until_told(lambda: warned(app), lambda found: len(found) == 1)
            assert warning["subject"] == two.endpoint
