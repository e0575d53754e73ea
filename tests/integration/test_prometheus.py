"""A real Prometheus scrapes engines and router: what dashboard and alerts ask for exists, and alerts fire."""

import asyncio
import contextlib
import itertools
import json
import re
import time
from pathlib import Path

import aiohttp
import grpc
import pytest
import yaml

from extproc.pb import ext_proc_pb2 as pb
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.endpoint_picker import EXTERNAL_PROCESSOR_SERVICE
from extproc.sim.time_model import TimeModel
from tests.support.full_stack import FullStack, Worker
from tests.support.prometheus import DEADLINE_S, RULES, Prometheus, require
from tests.support.sim_engine import SimEngine

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(180)]

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "warmroute.json"
WINDOW = "5s"
ADMIN = re.compile(r"http://(127\.0\.0\.1:\d+)/")
LONG = "This prompt is long enough to fill some blocks of the cache, and to take a while to compute. " * 8


def impatient_rules():
    """The rules as they are, but without patience: no `for`, and windows of seconds."""
    document = yaml.safe_load(RULES.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
            rule["expr"] = re.sub(r"\[\d+m\]", f"[{WINDOW}]", rule["expr"])
    return document


class Watched:
    """A fleet and the Prometheus that watches it."""

    def __init__(self, stack, prometheus, engines):
        self.stack = stack
        self.prometheus = prometheus
        self.engines = engines
        self._pending = []

    def ask(self, prompt, **fields):
        """Send a request whose answer may never come."""
        self._pending.append(asyncio.create_task(self.stack.chat(prompt, **fields)))

    def ask_directly(self, engine, prompt, max_tokens=4):
        """The same past the router."""
        self._pending.append(asyncio.create_task(_complete(engine, prompt, max_tokens)))

    async def until_healthy(self):
        """All targets are scraped, all KV events have been seen, and no alert fires."""
        await self.warm_up()
        prometheus = self.prometheus

        async def healthy():
            up = await prometheus.query("up")
            return (
                len(up) == 1 + len(self.engines)
                and all(value for _, value in up)
                and not await prometheus.firing()
            )

        await prometheus.until(healthy, "a healthy fleet")

    async def warm_up(self):
        """Until every engine has published something, and its events are complete."""
        number = 0
        while self.stack.router_log().count(": complete (") < len(self.engines):
            number += 1
            assert number < 200
            await asyncio.gather(
                *(self.stack.chat(f"{number} {part} {LONG}", max_tokens=1) for part in "abcd")
            )

    async def until_firing(self, alert):
        async def fires():
            return alert in await self.prometheus.firing()

        await self.prometheus.until(fires, f"{alert} to fire")
        for one in await self.prometheus.alerts():
            assert "error" not in str(one["annotations"]).lower().replace("ext_proc_errors", ""), one
            assert "<no value>" not in str(one["annotations"])

    async def end(self):
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)


async def _complete(engine, prompt, max_tokens):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with (
        aiohttp.ClientSession(engine.base_url) as session,
        session.post("/v1/completions", json=body) as reply,
    ):
        await reply.read()


@contextlib.asynccontextmanager
async def watched(tmp_path, *, engines=2, pool=None, engine=None, **settings):
    require("prometheus")
    async with contextlib.AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(SimEngine(**(engine or {}))) for _ in range(engines)]
        workers = [Worker(one.endpoint, one.kv_events, one.kv_replay) for one in fleet]
        settings = {"admin": {"listen": "127.0.0.1:0"}, **settings}
        full = await stack.enter_async_context(FullStack(tmp_path, workers, settings=settings, pool=pool))
        admin = ADMIN.search(full.router_log())
        assert admin is not None, full.router_log()
        targets = {"warmroute": [admin[1]], "vllm": [one.endpoint for one in fleet]}
        prometheus = await stack.enter_async_context(Prometheus(tmp_path, targets, impatient_rules()))
        made = Watched(full, prometheus, fleet)
        stack.push_async_callback(made.end)
        yield made


async def gateway_that_says(stack, *messages):
    """An ext_proc stream of a gateway without access log."""
    address = stack.settings["listen"]
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(
            f"/{EXTERNAL_PROCESSOR_SERVICE}/Process",
            pb.ProcessingRequest.SerializeToString,
            pb.ProcessingResponse.FromString,
        )()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        async for _ in call:
            pass


def headers_message():
    message = pb.ProcessingRequest()
    message.request_headers.end_of_stream = True
    for key, value in ((":method", "GET"), (":path", "/v1/models"), (":authority", "a")):
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    return message


def as_asked(expression):
    """A query of the dashboard with its variables filled in, as Grafana does."""
    return expression.replace("$__rate_interval", "30s").replace("$pool", ".*").replace("$prompt_class", ".*")


async def test_everything_that_dashboard_and_alerts_ask_for_is_there(tmp_path):
    shadows = ["round-robin", "least-load", "session-affinity"]
    async with watched(tmp_path, shadow=shadows, engine={"num_gpu_blocks": 160}) as fleet:
        stack, prometheus = fleet.stack, fleet.prometheus
        await fleet.until_healthy()

        async def traffic(number):
            await stack.chat(LONG, stream=True)  # warm
            await stack.chat(f"{LONG} {number}", stream=True)  # partly
            await stack.chat(f"{number} {LONG}", stream=True)  # cold, and evicts
            await stack.complete("Not streamed.")
            assert (await stack.post("/v1/chat/completions", b"{not json")).status == 400
            assert (await stack.post("/v1/embeddings", {"model": "tiny", "input": "x"})).status >= 400
            fleet.engines[number % 2].faults.status = 503  # makes Envoy try another
            await stack.chat(f"{number} elsewhere")
            fleet.engines[number % 2].faults.status = None

        expressions = {
            as_asked(target["expr"])
            for panel in json.loads(DASHBOARD.read_text())["panels"]
            for target in panel.get("targets", ())
        }
        names = {
            name
            for group in impatient_rules()["groups"]
            for rule in group["rules"]
            for name in re.findall(r"\bwarmroute_\w+", rule["expr"])
        }
        missing = expressions | names
        end = time.monotonic() + DEADLINE_S

        async def complete():
            for one in sorted(missing):
                if await (prometheus.series(one) if one in names else prometheus.query(one)):
                    missing.discard(one)
            return not missing

        for number in itertools.count():  # scrapes take their time, however fast requests are
            await traffic(number)
            if number >= 12 and await complete():
                break
            assert time.monotonic() < end, f"never there: {sorted(missing)}\n{stack.router_log()}"


# --- the faults, each in a fleet of its own --------------------------------------------------------------


async def test_missing(tmp_path):
    async with watched(tmp_path) as fleet:
        await fleet.until_healthy()
        await fleet.stack.stop_router()
        await fleet.until_firing("WarmrouteMissing")


async def test_no_worker_ready(tmp_path):
    async with watched(tmp_path) as fleet:
        await fleet.until_healthy()
        for engine in fleet.engines:
            await engine.kill()
        await fleet.until_firing("WarmrouteNoWorkerReady")


async def test_last_resort(tmp_path):
    async with watched(tmp_path) as fleet:
        await fleet.until_healthy()
        for engine in fleet.engines:
            engine.faults.metrics_status = 500
        await fleet.until_firing("WarmrouteLastResort")


async def test_predictions_diverge(tmp_path):
    template = tmp_path / "other.jinja"
    template.write_text("{% for message in messages %}Somebody said: {{ message.content }}\n{% endfor %}")
    model = {"path": str(tiny_model_path()), "names": ["tiny"], "chat_template": str(template)}
    async with watched(tmp_path, engines=1, pool={"model": model}) as fleet:
        await fleet.until_healthy()
        for _ in range(12):
            await fleet.stack.chat(LONG)
        await fleet.until_firing("WarmroutePredictionsDiverge")


async def test_metrics_stale(tmp_path):
    async with watched(tmp_path) as fleet:
        await fleet.until_healthy()
        fleet.engines[0].faults.metrics_hang = True
        await fleet.until_firing("WarmrouteMetricsStale")


async def test_kv_events_stale(tmp_path):
    async with watched(tmp_path) as fleet:
        await fleet.until_healthy()
        await fleet.engines[0].kill()
        await fleet.until_firing("WarmrouteKvEventsStale")


async def test_warm_denied(tmp_path):
    # Prefill is dear, and delays others more than us: a warm worker is cheapest even when its wait is long.
    cost = {"prefill_tokens_per_s": 500, "interference": 50, "max_extra_ttft_ms": 0}
    engine = {"time": TimeModel(base_ms=10.0), "max_num_seqs": 5}
    async with watched(tmp_path, cost=cost, engine=engine) as fleet:
        await fleet.until_healthy()
        stack = fleet.stack
        held = {}
        for number in range(32):
            entry = await stack.decision((await stack.chat(f"{number} {LONG}", max_tokens=1)).request_id)
            held.setdefault(entry["selected_worker"], []).append(f"{number} {LONG}")
        warm = max(held, key=lambda worker: len(held[worker]))
        holder, other = sorted(fleet.engines, key=lambda engine: engine.endpoint != warm)
        for number in range(4):  # of others, whom a prefill delays that the holder would not need
            fleet.ask_directly(other, f"Somebody's {number}", max_tokens=10_000)
        await stack.until(lambda: other.model.running == 4)
        for number in range(9):
            fleet.ask_directly(holder, f"Somebody else's {number}", max_tokens=10_000)
        await stack.until(lambda: holder.model.waiting == 4)

        async def queued():
            name = "warmroute_worker_foreign_requests"
            seen = {labels["state"]: value for labels, value in await fleet.prometheus.query(f"{name} > 2")}
            return seen.keys() == {"waiting", "running"}

        await fleet.prometheus.until(queued, "requests of others to be seen")
        prompts = iter(held[warm])  # each is denied once: then the other worker has it, too

        async def fires():
            await stack.chat(next(prompts, "none left"), max_tokens=1)
            return "WarmrouteWarmDenied" in await fleet.prometheus.firing()

        await fleet.prometheus.until(fires, "WarmrouteWarmDenied to fire")


async def test_herd(tmp_path):
    async with watched(tmp_path, policy="kv-affinity", cost={"prefill_tokens_per_s": 200}) as fleet:
        await fleet.until_healthy()
        warm = (await fleet.stack.until_warm(LONG))["selected_worker"]
        holder = next(engine for engine in fleet.engines if engine.endpoint == warm)
        holder.pause()
        for number in range(10):
            fleet.ask(f"{LONG} {number} {LONG}")
        await fleet.until_firing("WarmrouteHerd")
        holder.resume()


async def test_leases_lost(tmp_path):
    async with watched(tmp_path, engines=1) as fleet:
        await fleet.until_healthy()
        fleet.engines[0].faults.hang = True
        fleet.ask("Swallowed.")
        await fleet.until_firing("WarmrouteLeasesLost")


async def test_access_log_missing(tmp_path):
    async with watched(tmp_path) as fleet:
        await fleet.until_healthy()
        await fleet.stack.envoy.stop()

        async def fires():
            await gateway_that_says(fleet.stack, headers_message())
            return "WarmrouteAccessLogMissing" in await fleet.prometheus.firing()

        await fleet.prometheus.until(fires, "WarmrouteAccessLogMissing to fire")


async def test_faults(tmp_path):
    async with watched(tmp_path) as fleet:
        await fleet.until_healthy()
        await gateway_that_says(fleet.stack, headers_message(), headers_message())
        await fleet.until_firing("WarmrouteFaults")


async def test_prompts_not_read(tmp_path):
    async with watched(tmp_path, limits={"prompt_budget_ms": 0.001}) as fleet:

        async def fires():
            assert (await fleet.stack.chat(LONG * 4)).status == 200
            return "WarmroutePromptsNotRead" in await fleet.prometheus.firing()

        await fleet.prometheus.until(fires, "WarmroutePromptsNotRead to fire")


async def test_timeouts(tmp_path):
    async with watched(tmp_path) as fleet:
        await fleet.until_healthy()
        for engine in fleet.engines:
            engine.faults.status = 504

        async def fires():
            assert (await fleet.stack.chat("Anybody?")).status == 504
            return "WarmrouteTimeouts" in await fleet.prometheus.firing()

        await fleet.prometheus.until(fires, "WarmrouteTimeouts to fire")


def test_every_alert_has_its_fault():
    tested = {name.removeprefix("test_").replace("_", "") for name in globals() if name.startswith("test_")}
    alerts = {rule["alert"] for group in impatient_rules()["groups"] for rule in group["rules"]}
    assert {alert.removeprefix("Warmroute").lower() for alert in alerts} <= tested
