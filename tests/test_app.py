import asyncio
import json
import os
import socket

import aiohttp
import pytest
import yaml

from extproc import config as configuration
from extproc.adapters.peer_codec import Completed
from extproc.adapters.routing import HttpRequest
from extproc.app import App
from extproc.cli import main
from extproc.core.errors import WarmrouteError
from extproc.core.types import Completion, Outcome
from extproc.fleet_watch import FleetWatch
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.ext_proc_messages import Route
from tests.support.ports import free_port, free_ports
from tests.support.sim_engine import SimEngine
from tests.support.waiting import until

_STREAMS = "warmroute_access_log_streams "
TEXT = "Once upon a time, in a land far away. " * 12


def settings(tmp_path, *engines, pool=None, **rest):
    static = [{"endpoint": e.endpoint, "kv_events": e.kv_events, "kv_replay": e.kv_replay} for e in engines]
    described = {"model": {"path": str(tiny_model_path())}, "discovery": {"static": static}, **(pool or {})}
    given = {
        "listen": "127.0.0.1:0",
        "seed": 1,
        "scrape": {"interval_s": 0.05},
        "decision_log": {"path": str(tmp_path / "decisions.jsonl")},
        "pools": [described],
        **rest,
    }
    return configuration.parse(yaml.safe_dump(given))


class Running(App):
    """An application that keeps what it says."""

    def __init__(self, config):
        self.said = []
        super().__init__(config, self.said.append)

    def says(self, *words):
        return lambda: any(all(word in line for word in words) for line in self.said)

    async def ask(self, prompt=TEXT, model="tiny"):
        body = json.dumps({"model": model, "prompt": prompt}).encode()
        request = HttpRequest("POST", "/v1/completions", {}, body, None, None, "r")
        return await self.service.route(request)


def leftovers():
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_it_starts_learns_of_its_engines_routes_and_leaves_nothing(tmp_path):
    async with SimEngine(block_size=32) as one, SimEngine(block_size=32) as two:
        before = set(leftovers())
        async with Running(settings(tmp_path, one, two)) as app:
            assert app.address.startswith("127.0.0.1:")
            assert not app.address.endswith(":0")
            assert app.health.ready
            states = app.router.table.all()
            await until(lambda: all(s.metrics and s.kv_cause != "no KV events yet" for s in states))
            assert {state.metrics.block_size for state in states} == {32}
            await until(lambda: app.admission.catalog.names("default") == ("tiny",))
            route = await app.ask()
            assert isinstance(route, Route)
            assert len(route.endpoints) == 2
            app.service.completed(route.lease_id, Completion(Outcome.FINISHED))
        assert set(leftovers()) <= before
        (line,) = (tmp_path / "decisions.jsonl").read_text().splitlines()
        assert json.loads(line)["outcome"] == "finished"


async def test_what_an_engine_computed_is_found_again(tmp_path):
    async with SimEngine() as engine, Running(settings(tmp_path, engine)) as app:
        async with aiohttp.ClientSession(engine.base_url) as client:
            body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1}
            async with client.post("/v1/completions", json=body) as reply:
                assert reply.status == 200
        await until(lambda: app.router.index.stats().blocks > 0)
        route = await app.ask()
        assert app.router.ledger.get(route.lease_id).decision.chosen.cached_tokens > 0


async def test_ends_that_peers_tell_are_taken_after_decisions(tmp_path):
    async with (
        SimEngine() as engine,
        Running(settings(tmp_path, engine, peers={"listen": "127.0.0.1:0"})) as app,
    ):
        route = await app.ask()
        app.exchange.forwarding.take([Completed(route.lease_id, Completion(Outcome.FINISHED))])
        assert len(app.router.ledger) == 1
        await until(lambda: len(app.router.ledger) == 0)


async def test_a_lease_nobody_ends_is_written_off(tmp_path):
    async with SimEngine() as engine:
        config = settings(tmp_path, engine, limits={"lease_expiry_s": 0.1})
        async with Running(config) as app:
            await app.ask()
            await until(lambda: len(app.router.ledger) == 0)
            assert app.service.counters.lost == 1


async def test_what_fails_in_the_background_keeps_nothing_else_from_being_done(tmp_path, monkeypatch, caplog):
    tried = []

    def update_health(_watch):
        tried.append(True)
        if len(tried) > 2:  # while it starts, it works
            raise RuntimeError("a bug")

    monkeypatch.setattr(FleetWatch, "update_health", update_health)
    async with SimEngine() as engine:
        config = settings(tmp_path, engine, limits={"lease_expiry_s": 0.1})
        async with Running(config) as app:
            await until(lambda: "update_health failed" in caplog.text)
            await app.ask()
            await until(lambda: app.service.counters.lost == 1)
            failed = len(tried)
            await until(lambda: len(tried) > failed)


async def test_when_it_cannot_listen_what_was_started_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("extproc.app.refuse_taken", lambda _address: None)  # taken a moment later
    async with SimEngine() as engine:
        before = set(leftovers())
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            listen = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(WarmrouteError, match="cannot listen"):
                async with Running(settings(tmp_path, engine, listen=listen)):
                    pytest.fail("it must not start")
        assert set(leftovers()) <= before


@pytest.mark.parametrize("late", [False, True])
async def test_a_second_start_on_the_same_port_leaves_the_first_ones_files_alone(tmp_path, monkeypatch, late):
    if late:
        monkeypatch.setattr("extproc.app.refuse_taken", lambda _address: None)
    kept = {
        "listen": f"127.0.0.1:{free_port()}",
        "journal": {"path": str(tmp_path / "journal")},
        "peers": {"snapshot": {"path": str(tmp_path / "snapshot")}},
    }
    async with SimEngine() as engine:
        config = settings(tmp_path, engine, **kept)
        async with Running(config) as first:
            before = (tmp_path / "journal").stat().st_ino
            with pytest.raises(WarmrouteError, match=f"cannot listen on {first.address}: is the port in use"):
                async with Running(config):
                    pytest.fail("it must not start")
            assert (tmp_path / "journal").stat().st_ino == before
            assert not (tmp_path / "journal.1").exists()
            assert not (tmp_path / "snapshot").exists()  # that of the second, which knows nothing
            await first.ask()
        async with Running(config):
            assert (tmp_path / "journal.1").stat().st_ino == before


async def test_a_start_that_fails_late_leaves_the_snapshot_alone(tmp_path):
    kept = {"peers": {"snapshot": {"path": str(tmp_path / "snapshot")}}}
    async with SimEngine() as engine:
        async with Running(settings(tmp_path, engine, **kept)):
            pass
        before = (tmp_path / "snapshot").stat().st_ino
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            admin = {"listen": f"127.0.0.1:{taken.getsockname()[1]}"}
            with pytest.raises(WarmrouteError, match="admin"):
                async with Running(settings(tmp_path, engine, admin=admin, **kept)):
                    pytest.fail("it must not start")
        assert (tmp_path / "snapshot").stat().st_ino == before


async def test_a_journal_that_cannot_be_written_is_said_before_anybody_is_served(tmp_path):
    async with SimEngine() as engine:
        app = App(settings(tmp_path, engine, journal={"path": str(tmp_path / "nowhere" / "journal")}), print)
        with pytest.raises(WarmrouteError, match="cannot write the journal"):
            async with app:
                pytest.fail("it must not start")
        assert app.server is None


async def test_before_it_starts_it_has_no_address(tmp_path):
    async with SimEngine() as engine:
        with pytest.raises(RuntimeError, match="not started"):
            _ = App(settings(tmp_path, engine), print).address


async def test_port_that_is_free_can_be_chosen(tmp_path):
    port = free_port()
    async with SimEngine() as engine, Running(settings(tmp_path, engine, listen=f"127.0.0.1:{port}")) as app:
        assert app.address == f"127.0.0.1:{port}"


async def asked(app, path, **headers):
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://{app.admin.address}{path}", headers=headers) as reply,
    ):
        return reply.status, await reply.text()


async def test_the_admin_server_shows_what_the_service_does(tmp_path):
    canary = {"name": "canary", "mode": "observe", "header": "x-canary"}
    admin = {
        "admin": {"listen": "127.0.0.1:0"},
        "shadow": ["least-load"],
        "rollout": {"classes": [canary]},
    }
    async with SimEngine() as engine, Running(settings(tmp_path, engine, **admin)) as app:
        assert app.says("status page: http://127.0.0.1:")()
        assert await asked(app, "/readyz") == (200, "ok\n")
        (state,) = app.router.table.all()
        await until(lambda: state.metrics_at is not None)
        _, text = await asked(app, "/metrics", Accept="text/plain;q=0.5")
        begins = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in text.splitlines()}
        for series in (
            'prompt_characters_total{pool="default",state="new"}',
            'prompt_characters_total{pool="default",state="known"}',
            'prompt_hash_stretches_total{state="new"}',
            'prompt_hash_stretches_total{state="known"}',
            "admin_connections_cut_total",
            "index_recalled_workers_total",
        ):
            assert begins[f"warmroute_{series}"] == "0.0", series  # also after warming up
        route = await app.ask()
        _, text = await asked(app, "/explain/r")
        assert json.loads(text)["decision"]["outcome"] == "open"
        app.service.completed(route.lease_id, Completion(Outcome.FINISHED))
        _, text = await asked(app, "/explain/r")  # what was put off is done before anybody looks
        (line,) = (tmp_path / "decisions.jsonl").read_text().splitlines()
        assert json.loads(text)["decision"] == json.loads(line)
        _, text = await asked(app, "/metrics")
        assert "warmroute_decisions_total{" in text
        engine.faults.metrics_status = 500
        await until(app.says("not ready", "500"))
        assert (await asked(app, "/readyz"))[0] == 200  # there is nobody better
        _, text = await asked(app, "/state")
        shown = json.loads(text)
        assert shown["counters"]["routed"] == 1
        assert (shown["shadow"], shown["mode"]) == (["least-load"], "enforce (canary: observe)")
        assert any("500" in one["cause"] for one in shown["warnings"])
        await engine.kill()
        await until(lambda: not app.health.ready)
        assert (await asked(app, "/readyz"))[0] == 503
        assert (await asked(app, "/"))[1].startswith("<!doctype html>")


async def test_long_prompts_are_encoded_in_processes_of_their_own_that_leave_with_it(tmp_path):
    long = TEXT * 650
    admin = {"admin": {"listen": "127.0.0.1:0"}, "prompt_processes": 1}
    async with SimEngine() as engine, Running(settings(tmp_path, engine, **admin)) as app:
        processes = app._pools.processes
        await app.ask()
        assert processes.pids == ()  # warming up has started none, nor do short prompts
        await app.ask(long)
        (pid,) = processes.pids

        async with asyncio.timeout(60.0):
            while processes.state().hashed.new == 0:
                await app.ask(long)
        _, text = await asked(app, "/metrics")
        assert "warmroute_prompt_processes 1.0" in text
        decisions = [app.router.ledger.get(lease.id).decision for lease in app.router.ledger]
        assert {one.request.load_only for one in decisions} == {None}
        assert len({bytes(one.request.prompts[0]) for one in decisions}) == 2  # ids are the same everywhere
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_lines_that_were_put_off_are_written_when_it_stops(tmp_path):
    async with SimEngine() as engine, Running(settings(tmp_path, engine)) as app:
        (state,) = app.router.table.all()
        await until(lambda: state.metrics_at is not None)
        leases = [(await app.ask()).lease_id for _ in range(20)]
        for lease in leases:
            app.service.completed(lease, Completion(Outcome.FINISHED))
        assert not (tmp_path / "decisions.jsonl").read_text()
    assert len((tmp_path / "decisions.jsonl").read_text().splitlines()) == 20


async def test_requests_that_are_open_when_it_stops_have_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr("extproc.adapters.deferred.DELAY_S", 3600.0)  # what is put off is done at the end
    kept = {"journal": {"path": str(tmp_path / "journal")}}
    async with SimEngine() as engine, Running(settings(tmp_path, engine, **kept)) as app:
        ended, told_late, _ = [(await app.ask()).lease_id for _ in range(3)]
        app.service.completed(ended, Completion(Outcome.FINISHED))
        app._later.add(lambda: app.service.completed(told_late, Completion(Outcome.CANCELLED)))
    entries = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    assert [(entry["outcome"], entry["details"]) for entry in entries] == [
        ("finished", None),
        ("cancelled", None),
        ("lost", "the router stopped"),
    ]
    assert await asyncio.to_thread(main, ["replay", str(tmp_path / "journal")]) == 0


def replicas(tmp_path, engine, exchange, **rest):
    """Two that are each other's peers."""
    ports = free_ports(2)
    for number, (own, others) in enumerate((ports, ports[::-1])):
        peers = {
            "name": f"replica-{number}",
            "listen": f"127.0.0.1:{own}",
            "static": [f"127.0.0.1:{others}"],
            **exchange,
        }
        folder = tmp_path / str(number)
        folder.mkdir()
        yield Running(settings(folder, engine, peers=peers, **rest))


async def test_a_replica_that_stops_does_not_tell_that_its_open_requests_are_over(tmp_path):
    """Their workers go on with them."""
    patient = {"interval_s": 0.001, "fade_after_s": 600.0, "gone_after_s": 1200.0}
    async with SimEngine() as engine:
        stays, stops = replicas(tmp_path, engine, patient, admin={"listen": ""})

        def told():
            return stays.router.peers.load(state.id, stays._clock()).sequences

        async with stays:
            async with stops:
                (state,) = stays.router.table.all()
                for _ in range(3):
                    await stops.ask()
                await until(lambda: told() == 3)
            assert told() == 3
            assert (tmp_path / "1" / "decisions.jsonl").read_text().count('"the router stopped"') == 3


async def test_an_access_log_that_reaches_a_peer_is_none_that_is_missing(tmp_path):
    """The alert looks at each replica, and Envoy's log may go to another one, which hands it on."""

    def streams(app):
        page = app.telemetry.page().body.decode()
        return [float(line.split()[1]) for line in page.splitlines() if line.startswith(_STREAMS)]

    async with SimEngine() as engine:
        one, other = replicas(tmp_path, engine, {"interval_s": 0.01}, admin={"listen": "127.0.0.1:0"})
        async with one, other:
            assert streams(one) == streams(other) == [0.0]
            one.exchange.forwarding.access_log_streams(2)  # its access log server says
            await until(lambda: streams(one) == [2.0] and streams(other) == [1.0])


async def test_the_admin_servers_token_is_read_from_its_file(tmp_path):
    (tmp_path / "token").write_text("a-word\n")
    admin = {"admin": {"listen": "127.0.0.1:0", "token_file": str(tmp_path / "token")}}
    async with SimEngine() as engine, Running(settings(tmp_path, engine, **admin)) as app:
        assert (await asked(app, "/state"))[0] == 401
        assert (await asked(app, "/state", Authorization="Bearer a-word"))[0] == 200


async def test_an_admin_address_that_was_asked_for_and_is_taken_is_an_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        admin = {"admin": {"listen": f"127.0.0.1:{taken.getsockname()[1]}"}}
        async with SimEngine() as engine:
            with pytest.raises(WarmrouteError, match=r"admin: cannot listen"):
                async with Running(settings(tmp_path, engine, **admin)):
                    pass


async def test_one_that_nobody_asked_for_costs_no_request(tmp_path):
    async with SimEngine() as engine:
        first, second = (Running(settings(tmp_path / name, engine)) for name in "ab")
        for name in "ab":
            (tmp_path / name).mkdir()
        async with first, second:
            assert second.says("cannot listen on 127.0.0.1:9902", "requests are served all the same")()
            assert isinstance(await second.ask(), Route)


async def test_without_an_address_there_is_no_admin_server(tmp_path):
    async with SimEngine() as engine, Running(settings(tmp_path, engine, admin={"listen": ""})) as app:
        assert not app.says("status page")()
        assert not app.says("admin:")()


async def test_what_a_service_decided_is_decided_again_from_its_journal(tmp_path, capsys):
    kept = {"journal": {"path": str(tmp_path / "journal")}, "shadow": ["least-load"], "seed": None}
    async with SimEngine() as one, SimEngine() as two, Running(settings(tmp_path, one, two, **kept)) as app:
        states = app.router.table.all()
        await until(lambda: all(state.metrics_at is not None for state in states))
        async with aiohttp.ClientSession() as client:
            for number in range(40):
                route = await app.ask(f"{number % 3} {TEXT * (1 + number % 4)}")
                body = {"model": "tiny", "prompt": f"{number % 3} {TEXT * (1 + number % 4)}", "max_tokens": 1}
                async with client.post(f"http://{route.endpoints[0]}/v1/completions", json=body) as reply:
                    usage = (await reply.json())["usage"]
                if number % 7 == 0:
                    app.service.stream_ended(route.lease_id, cancelled=True)
                    continue
                done = Completion(
                    Outcome.FINISHED,
                    route.endpoints[0],
                    200,
                    1,
                    20.0,
                    19.0,
                    90.0,
                    prompt_tokens=usage["prompt_tokens"],
                )
                app.service.first_body(route.lease_id)
                app.service.completed(route.lease_id, done)
        await until(lambda: app.router.index.stats().blocks > 0)
        await one.restart()
        await app.ask("the last one")
    assert await asyncio.to_thread(main, ["replay", str(tmp_path / "journal"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == found["exact"] == 41
    prompt = b"Once upon a time"
    assert prompt not in (tmp_path / "journal").read_bytes()
