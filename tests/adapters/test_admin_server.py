import asyncio
import json
from urllib.parse import quote

import aiohttp
import pytest

from extproc.adapters.admin_server import AdminError, AdminServer
from tests.support.watched import Watched


@pytest.fixture
async def watched(tmp_path):
    async with Watched(tmp_path) as one:
        yield one


WORD = "s3cret"


@pytest.fixture
async def guarded(tmp_path):
    async with Watched(tmp_path, token=WORD) as one:
        yield one


async def get(watched, path, **headers):
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"{watched.url}{path}", headers=headers) as reply,
    ):
        return reply.status, await reply.text(), reply.headers


async def test_it_lives_and_is_ready_while_there_is_somewhere_to_go(watched):
    assert (await get(watched, "/livez"))[:2] == (200, "ok\n")
    assert (await get(watched, "/readyz"))[:2] == (200, "ok\n")
    watched.router.on_membership([], 0.0)
    assert (await get(watched, "/livez"))[0] == 200
    status, text, _ = await get(watched, "/readyz")
    assert status == 503
    assert "no worker" in text


async def test_metrics_come_in_the_format_that_is_asked_for(watched):
    status, text, headers = await get(watched, "/metrics", Accept="application/openmetrics-text")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4")
    assert text == "# application/openmetrics-text\nup 1\n"


async def test_state_is_json_and_of_now(watched):
    status, text, headers = await get(watched, "/state")
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    assert headers["Cache-Control"] == "no-store"
    assert len(json.loads(text)["workers"]) == 3


async def test_many_watchers_cost_as_much_as_one(watched, monkeypatch):
    asked = []
    state = watched.admin._sources.state

    def counted():
        asked.append(1)
        return state()

    object.__setattr__(watched.admin._sources, "state", counted)
    answers = await asyncio.gather(*(get(watched, "/state") for _ in range(12)))
    assert {status for status, *_ in answers} == {200}
    assert len(asked) < 12


async def test_many_scrapers_cost_as_much_as_one(watched, monkeypatch):
    made = []
    metrics = watched.admin._sources.metrics

    def counted(accept):
        made.append(accept)
        return metrics(accept)

    object.__setattr__(watched.admin._sources, "metrics", counted)
    await asyncio.gather(*(get(watched, "/metrics") for _ in range(12)))
    assert len(made) < 12
    await asyncio.gather(*(get(watched, "/metrics", Accept=f"text/{number}") for number in range(40)))
    assert len(watched.admin._pages) <= 8


async def test_it_knows_whether_it_is_open_to_others(tmp_path):
    async with Watched(tmp_path) as watched:
        assert not watched.admin.is_open
    async with Watched(tmp_path, listen="0.0.0.0:0") as watched:
        assert watched.admin.is_open
    async with Watched(tmp_path, listen="0.0.0.0:0", token=WORD) as watched:
        assert not watched.admin.is_open


async def test_a_connection_that_is_answered_is_known_to_be(watched):
    async with aiohttp.ClientSession() as client, client.get(f"{watched.url}/livez") as reply:
        assert await reply.text() == "ok\n"
        assert len(watched.admin._listener._answered) == 1


@pytest.mark.parametrize("request_id", ["plain", "with/slash", "with space", "ünïcode", "?&#%", "a" * 300])
async def test_a_request_is_found_by_its_id_whatever_it_is(watched, request_id):
    watched.ask(request_id)
    status, text, _ = await get(watched, f"/explain/{quote(request_id, safe='')}")
    assert status == 200
    assert json.loads(text)["decision"]["request_id"] == request_id


async def test_it_explains_in_plain_text_too(watched):
    watched.ask("one")
    status, text, headers = await get(watched, "/explain/one", Accept="text/plain")
    assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert text.startswith("Request one -> ")


async def test_a_request_that_is_not_over_is_explained(watched):
    watched.route("running")
    _, text, _ = await get(watched, "/explain/running")
    assert json.loads(text)["decision"]["outcome"] == "open"


async def test_what_is_not_known_says_where_to_look(watched):
    status, text, _ = await get(watched, "/explain/nobody")
    assert status == 404
    assert "--log" in text


@pytest.mark.parametrize("path", ["/nothing", "/explain/", "/state/x"])
async def test_other_paths_are_not_there(watched, path):
    assert (await get(watched, path))[0] == 404


async def test_nothing_can_be_changed(watched):
    async with aiohttp.ClientSession() as client:
        for method in ("POST", "PUT", "DELETE"):
            async with client.request(method, f"{watched.url}/state") as reply:
                assert reply.status == 405


async def test_the_page_may_load_nothing_from_elsewhere(watched):
    _, text, headers = await get(watched, "/")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "'unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "https://" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("path", ["/state", "/metrics", "/explain/x", "/nothing"])
@pytest.mark.parametrize("given", [None, "Bearer wrong", "Basic s3cret", "s3cret", "Bearer"])
async def test_without_the_token_nothing_is_told(guarded, path, given):
    headers = {} if given is None else {"Authorization": given}
    status, text, answered = await get(guarded, path, **headers)
    assert status == 401
    assert answered["WWW-Authenticate"].startswith("Bearer")
    assert "worker" not in text


async def test_a_token_that_is_no_text_is_a_wrong_one(guarded, caplog):
    reader, writer = await asyncio.open_connection(*guarded.admin.address.split(":"))
    writer.write(b"GET /state HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()
    assert caplog.text == ""


async def test_with_the_token_everything_is_and_health_needs_none(guarded):
    assert (await get(guarded, "/state", Authorization="Bearer s3cret"))[0] == 200
    for path in ("/livez", "/readyz", "/"):
        assert (await get(guarded, path))[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example"])
async def test_a_web_page_cannot_read_it_under_a_name_of_its_own(watched, host):
    assert (await get(watched, "/state", Host=host))[0] == 403


@pytest.mark.parametrize(
    "host", [b"[", b"", b"a b", b"[::2]", b"127.0.0.1@evil", b"\xff", b"x" * 5000, b":80"]
)
@pytest.mark.parametrize("path", [b"/state", b"//state", b"/explain/%ff%00", b"/explain/..%2f.."])
async def test_a_host_that_is_none_is_refused_without_a_fault(watched, host, path, caplog):
    where, port = watched.admin.address.split(":")
    reader, writer = await asyncio.open_connection(where, int(port))
    writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    await writer.wait_closed()
    assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))
    assert caplog.records == []


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1", "[::1]:80", "app.localhost"])
async def test_loopback_names_are_fine(watched, host):
    assert (await get(watched, "/state", Host=host))[0] == 200


async def test_with_a_token_any_name_is_fine(guarded):
    assert (await get(guarded, "/state", Host="a.example", Authorization="Bearer s3cret"))[0] == 200


async def test_an_address_in_use_is_named(watched):
    other = AdminServer(watched.admin._sources)
    with pytest.raises(AdminError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*`admin\.listen`"):
        await other.start(watched.admin.address)


async def test_after_closing_nobody_answers(tmp_path):
    async with Watched(tmp_path) as one:
        url = one.url
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(f"{url}/livez")
