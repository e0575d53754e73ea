import asyncio
import random
import sys
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from extproc.adapters.discovery import Discovery
from extproc.adapters.kubernetes_discovery import (
    KubernetesConfigError,
    KubernetesDiscovery,
    KubernetesSettings,
    connect,
)
from extproc.core.types import Member
from tests.support.kubernetes_api import BEARER, NAMESPACE, KubernetesApi, endpoint
from tests.support.waiting import until

FAST = {"least_backoff_s": 0.01, "most_backoff_s": 0.05}
TEMPLATE = Member("", pool="p", dp_size=2, kv_events="tcp://*:5557")


@asynccontextmanager
async def watching(api, tmp_path, **settings):
    """(a function that gives the endpoints now, reports)"""
    path = api.kubeconfig(tmp_path)
    made = KubernetesSettings("vllm", kubeconfig=path, **{**FAST, **settings})
    reports = []
    source = KubernetesDiscovery(made, TEMPLATE, random.Random(1))
    discovery = Discovery([source], on_members=lambda _: None, on_error=reports.append)
    async with discovery:
        yield (lambda: sorted(member.endpoint for member in discovery.members)), reports


async def test_ready_pods_are_members_and_changes_arrive(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1", endpoint("10.0.0.2", ready=False)])
        await api.put("other", ["10.9.9.9"], service="something-else")
        async with watching(api, tmp_path) as (now, reports):
            await until(lambda: now() == ["10.0.0.1:8000"])
            await until(lambda: api.open_watches == 1)
            await api.put("a", ["10.0.0.1", "10.0.0.2"])
            await api.put("b", ["10.0.0.3"])
            await until(lambda: now() == ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"])
            # Shutting down: it may still serve what it has, and gets nothing new.
            await api.put(
                "a", ["10.0.0.1", endpoint("10.0.0.2", ready=False, serving=True, terminating=True)]
            )
            await until(lambda: now() == ["10.0.0.1:8000", "10.0.0.3:8000"])
            await api.delete("b")
            await until(lambda: now() == ["10.0.0.1:8000"])
            assert api.lists == 1
            assert api.watches == 1
            assert reports == []


async def test_a_member_is_as_the_template_describes_it(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        told = []
        source = KubernetesDiscovery(
            KubernetesSettings("vllm", kubeconfig=api.kubeconfig(tmp_path)), TEMPLATE
        )
        async with Discovery([source], on_members=told.append, on_error=pytest.fail):
            await until(lambda: bool(told))
        assert told == [(replace(TEMPLATE, endpoint="10.0.0.1:8000"),)]


async def test_a_watch_that_breaks_is_taken_up_where_it_was(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path) as (now, _reports):
            for number in range(2, 6):
                await until(lambda: api.open_watches == 1)
                await api.disconnect()
                await until(lambda: api.open_watches == 0)
                await api.put(f"s{number}", [f"10.0.0.{number}"])
                await api.delete(f"s{number - 1}" if number > 2 else "a")
                await until(lambda n=number: now() == [f"10.0.0.{n}:8000"])
            assert api.lists == 1


async def test_a_watch_that_the_server_ends_is_taken_up_without_a_word(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path, watch_s=1) as (now, reports):
            await until(lambda: api.watches >= 2)
            await api.put("a", ["10.0.0.2"])
            await until(lambda: now() == ["10.0.0.2:8000"])
            assert api.lists == 1
            assert reports == []


@pytest.mark.parametrize("as_status", [True, False])
async def test_410_gone_lists_again_and_finds_what_was_deleted(tmp_path, as_status):
    async with KubernetesApi() as api:
        api.gone_as_status = as_status
        await api.put("a", ["10.0.0.1"])
        await api.put("b", ["10.0.0.2"])
        async with watching(api, tmp_path) as (now, reports):
            await until(lambda: api.open_watches == 1)
            api.refuse = 500
            await api.disconnect()
            await api.delete("b")
            await api.put("c", ["10.0.0.3"])
            await api.forget_history()
            assert now() == ["10.0.0.1:8000", "10.0.0.2:8000"]  # the last good list stays meanwhile
            api.refuse = None
            await until(lambda: now() == ["10.0.0.1:8000", "10.0.0.3:8000"])
            assert api.lists == 2
            assert not any("410" in report for report in reports)


async def test_a_server_that_always_forgets_is_not_flooded(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        api.oldest = 1 << 40
        async with watching(api, tmp_path, least_backoff_s=0.2, most_backoff_s=0.2) as (now, reports):
            await until(lambda: any("410" in report for report in reports))
            assert api.watches <= 3
            assert now() == ["10.0.0.1:8000"]


async def test_bookmarks_keep_a_quiet_watch_from_falling_behind(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path) as (now, _reports):
            await until(lambda: api.open_watches == 1)
            before = api.version
            await api.bookmark()
            await until(lambda: api.bookmarks_sent == 1)
            await api.end_watches()
            await until(lambda: api.watches == 2)
            assert api.version > before
            assert api.queries[-1]["resourceVersion"] == str(api.version)
            assert now() == ["10.0.0.1:8000"]
            assert api.lists == 1


async def test_a_long_list_comes_in_pages(tmp_path):
    async with KubernetesApi(page=2) as api:
        for number in range(1, 6):
            await api.put(f"s{number}", [f"10.0.0.{number}"])
        async with watching(api, tmp_path) as (now, _reports):
            await until(lambda: now() == [f"10.0.0.{n}:8000" for n in range(1, 6)])
            assert api.lists == 3


async def test_the_list_is_read_again_now_and_then(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path, resync_s=0.0) as (now, _reports):
            await until(lambda: api.open_watches == 1)
            await api.put("a", ["10.0.0.2"])
            await until(lambda: api.lists == 2 and now() == ["10.0.0.2:8000"])


async def test_refusals_are_reported_once_with_what_to_do_and_end(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        api.refuse = 403
        async with watching(api, tmp_path) as (now, reports):
            await until(lambda: len(api.queries) > 5)
            assert len(reports) == 1
            assert f"{NAMESPACE}/vllm" in reports[0]
            assert "403: the test says so; allow get, list and watch on endpointslices" in reports[0]
            api.refuse = None
            await until(lambda: now() == ["10.0.0.1:8000"])


async def test_a_server_that_is_away_costs_no_worker(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path) as (now, reports):
            await until(lambda: api.open_watches == 1)
            await api.__aexit__(None, None, None)
            await until(lambda: any("cannot be reached" in report for report in reports))
            assert now() == ["10.0.0.1:8000"]
        await api.__aenter__()


async def test_credentials_that_are_renewed_are_read_again(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path) as (now, reports):
            await until(lambda: api.open_watches == 1)
            api.bearer = "the-next-one"
            await api.disconnect()
            await until(lambda: any("check the credentials" in report for report in reports))
            api.kubeconfig(tmp_path)
            await api.put("a", ["10.0.0.2"])
            await until(lambda: now() == ["10.0.0.2:8000"])


async def test_a_login_that_fails_for_a_while_ends_nothing(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path) as (now, reports):
            await until(lambda: api.open_watches == 1)
            path = tmp_path / "kubeconfig"
            path.write_text("{}")
            api.bearer = "the-next-one"
            await api.disconnect()
            await until(lambda: any("no credentials" in report for report in reports))
            assert now() == ["10.0.0.1:8000"]
            await api.put("a", ["10.0.0.2"])
            api.kubeconfig(tmp_path)
            await until(lambda: now() == ["10.0.0.2:8000"])


async def test_whatever_goes_wrong_is_reported_and_tried_again(tmp_path, monkeypatch):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        faults = [RuntimeError("exec: process returned 1")]

        async def connected(settings):
            connection = await connect(settings)

            async def ask(**query):
                if faults:
                    raise faults.pop()
                return await connection.ask(**query)

            return replace(connection, ask=ask)

        monkeypatch.setattr("extproc.adapters.kubernetes_discovery.connect", connected)
        async with watching(api, tmp_path) as (now, reports):
            await until(lambda: now() == ["10.0.0.1:8000"])
            assert len(reports) == 1
            assert "exec: process returned 1" in reports[0]


async def test_a_login_that_hangs_is_given_up(tmp_path, monkeypatch):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        logins = []

        async def connected(settings):
            logins.append(settings)
            if len(logins) == 2:
                await asyncio.Event().wait()
            return await connect(settings)

        monkeypatch.setattr("extproc.adapters.kubernetes_discovery.connect", connected)
        monkeypatch.setattr("extproc.adapters.kubernetes_discovery._LOGIN_S", 0.05)
        async with watching(api, tmp_path) as (now, reports):
            await until(lambda: api.open_watches == 1)
            api.bearer = "the-next-one"
            api.kubeconfig(tmp_path)
            await api.put("a", ["10.0.0.2"])
            await api.disconnect()
            await until(lambda: now() == ["10.0.0.2:8000"])
        assert len(logins) == 3
        assert any("no credentials for the Kubernetes API within" in report for report in reports)


async def test_a_version_that_cannot_be_watched_from_is_given_up(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path) as (now, _reports):
            await until(lambda: api.open_watches == 1)
            api.watchable = api.version + 1
            await api.disconnect()
            await api.put("a", ["10.0.0.2"])
            await until(lambda: now() == ["10.0.0.2:8000"])
            await until(lambda: api.open_watches == 1)


async def test_a_service_that_is_not_there_is_said_so(tmp_path):
    async with KubernetesApi() as api, watching(api, tmp_path) as (now, reports):
        await until(lambda: bool(reports))
        assert "has no EndpointSlice" in reports[0]
        await api.put("a", ["10.0.0.1"])
        await until(lambda: now() == ["10.0.0.1:8000"])
        assert len(reports) == 1


async def test_a_port_that_is_not_there_is_said_so(tmp_path):
    async with KubernetesApi() as api:
        await api.put("a", ["10.0.0.1"])
        async with watching(api, tmp_path, port="grpc") as (now, reports):
            await until(lambda: bool(reports))
            assert "no port 'grpc'; it has http 8000" in reports[0]
            assert now() == []


async def test_the_pods_own_credentials(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    settings = KubernetesSettings("vllm", service_account=tmp_path)
    with pytest.raises(KubernetesConfigError, match="mount its service account token"):
        await connect(settings)
    (tmp_path / "token").write_text(BEARER)
    (tmp_path / "ca.crt").write_text(_CERTIFICATE)
    (tmp_path / "namespace").write_text("ours\n")
    connection = await connect(settings)
    assert connection.namespace == "ours"
    await connection.close()
    connection = await connect(replace(settings, namespace="theirs"))
    assert connection.namespace == "theirs"
    await connection.close()


async def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(KubernetesConfigError, match=r"warmroute\[kubernetes\]"):
        await connect(KubernetesSettings("vllm"))


# Self-signed, of nobody.
_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBeTCCAR+gAwIBAgIUKia6+m6yPsLTGIocDfHbmreScg0wCgYIKoZIzj0EAwIw
ETEPMA0GA1UEAwwGbm9ib2R5MCAXDTI2MTEzMDA2MDMwMFoYDzIxMjYxMTA2MDYw
MzAwWjARMQ8wDQYDVQQDDAZub2JvZHkwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNC
AATGMaO3JDXjKFwwm/xX/ngOKyjyn68uTx61cA0633TXxr857Db/HLI7PoEeL238
DCj30+XmZfAOgMlhhwKkXVTWo1MwUTAdBgNVHQ4EFgQU4/R9rKm8raX4ZNJ/3pOU
4VuUQQowHwYDVR0jBBgwFoAU4/R9rKm8raX4ZNJ/3pOU4VuUQQowDwYDVR0TAQH/
BAUwAwEB/zAKBggqhkjOPQQDAgNIADBFAiAMRlvlcd26PGkG7Vr9Ia1XA3oMdUyY
WTY/jptCTIVHWgIhAO6VkK6npLaBViKGKEmVIHgZiTJEG7QURqECGNIeoel0
-----END CERTIFICATE-----
"""
