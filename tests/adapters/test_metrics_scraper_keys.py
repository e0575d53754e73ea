"""The key of a pool's engines: where the scraper sends it, and what comes of a refusal."""

import random
from dataclasses import replace

import pytest
from aiohttp import web

from extproc.adapters.engine_key import EngineKey
from extproc.adapters.metrics_scraper import MetricsScraper
from tests.adapters.test_metrics_scraper import PAGE, QUICK
from tests.support.http import Upstream
from tests.support.waiting import until


class Engine(Upstream):
    """Has metrics, and models for those who have its key."""

    def __init__(self, key):
        super().__init__(self._answer)
        self.key = key
        self.status = 401
        self.elsewhere = None

    async def _answer(self, request, received):
        if request.path == "/metrics":
            return web.Response(body=PAGE)
        if request.path == "/metrics/":
            return web.Response(status=404)
        if self.elsewhere is not None:
            return web.Response(status=307, headers={"Location": self.elsewhere})
        if received.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=self.status)
        return web.json_response({"data": [{"id": "tiny"}]})

    def authorizations(self, path):
        return [one.headers.get("authorization") for one in self.requests if one.path == path]


class Scrapes:
    def __init__(self, keys, settings=QUICK):
        self.models, self.refusals, self.metrics = [], [], []
        self.scraper = MetricsScraper(
            on_metrics=lambda endpoint, _: self.metrics.append(endpoint),
            on_failure=lambda *_: None,
            on_models=lambda endpoint, _: self.models.append(endpoint),
            on_refusal=lambda endpoint, why: self.refusals.append((endpoint, why)),
            key_of=keys.get,
            settings=settings,
            rng=random.Random(1),
        )

    async def __aenter__(self):
        await self.scraper.start()
        return self

    async def __aexit__(self, *_):
        await self.scraper.close()


@pytest.fixture
def key_file(tmp_path):
    def write(text, name="key"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


async def test_each_gets_its_own_key_and_for_its_models_only(key_file):
    async with Engine("a") as one, Engine("b") as two, Engine("") as open_:
        keys = {one.endpoint: EngineKey(key_file("a")), two.endpoint: EngineKey(key_file("b", "other"))}
        async with Scrapes(keys) as seen:
            seen.scraper.set_endpoints([one.endpoint, two.endpoint, open_.endpoint])
            everyone = {one.endpoint, two.endpoint, open_.endpoint}
            await until(lambda: everyone - {open_.endpoint} <= set(seen.models))
            await until(lambda: everyone <= set(seen.metrics) and seen.refusals)
            seen.scraper.look_at_models()
        assert set(one.authorizations("/v1/models")) == {"Bearer a"}
        assert set(two.authorizations("/v1/models")) == {"Bearer b"}
        assert set(open_.authorizations("/v1/models")) == {None}
        for engine in (one, two, open_):
            for path in ("/metrics", "/metrics/"):
                assert set(engine.authorizations(path)) == {None}


async def test_it_does_not_go_where_a_redirect_leads(key_file):
    async with Engine("a") as engine, Upstream() as other:
        engine.elsewhere = f"http://{other.endpoint}/v1/models"
        async with Scrapes({engine.endpoint: EngineKey(key_file("a"))}) as seen:
            seen.scraper.set_endpoints([engine.endpoint])
            await until(lambda: len(engine.authorizations("/v1/models")) >= 3)
        assert not other.requests
        assert not seen.models


async def test_a_key_that_was_changed_is_read_again_in_the_same_look(key_file):
    async with Engine("new") as engine:
        key = EngineKey(key_file("old"), pause_s=0.0)
        key_file("new")
        once = replace(QUICK, models_interval_s=3600.0)
        async with Scrapes({engine.endpoint: key}, once) as seen:
            seen.scraper.set_endpoints([engine.endpoint])
            seen.scraper.look_at_models()
            await until(lambda: seen.models)
        assert engine.authorizations("/v1/models") == ["Bearer old", "Bearer new"]
        assert not seen.refusals


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_is_told_and_other_answers_are_none(key_file, status, caplog):
    caplog.set_level("DEBUG")
    async with Engine("right") as engine:
        engine.status = 500
        async with Scrapes({engine.endpoint: EngineKey(key_file("wrong-key"), pause_s=0.0)}) as seen:
            seen.scraper.set_endpoints([engine.endpoint])
            await until(lambda: len(engine.authorizations("/v1/models")) >= 3)
            assert not seen.refusals
            engine.status = status
            await until(lambda: seen.refusals)
        assert f"answers {status}" in seen.refusals[0][1].text
        assert set(engine.authorizations("/v1/models")) == {"Bearer wrong-key"}
    assert "wrong-key" not in caplog.text
