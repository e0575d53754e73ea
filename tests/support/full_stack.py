"""The whole of Warmroute for tests: `warmroute serve` as a process and a real Envoy, in front of any engines.

async with FullStack(tmp_path, [Worker(engine.endpoint, engine.kv_events, engine.kv_replay)]) as stack:
    reply = await stack.chat("Hello")              # through Envoy
    entry = await stack.decision(reply.request_id) # its line in the decision log
    await stack.router.kill(); await stack.start_router()
"""

import asyncio
import contextlib
import io
import json
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from extproc import config as configuration
from extproc.adapters.child_process import ChildProcess
from extproc.adapters.envoy_bootstrap import bootstrap
from extproc.adapters.envoy_process import EnvoyProcess
from extproc.cli.envoy_config import envoy_settings
from extproc.prompt.tiny import tiny_model_path
from tests.support.decision_lines import DecisionLines
from tests.support.envoy import on_loopback, require_envoy
from tests.support.ports import free_port
from tests.support.waiting import until_told

DEADLINE_S = 30.0
START_S = 90.0


@dataclass(frozen=True, slots=True)
class Worker:
    endpoint: str
    kv_events: str | None
    kv_replay: str | None


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as a client sees it. `text` is the generated text, for streams joined from its pieces."""

    status: int
    request_id: str
    text: str
    usage: dict[str, Any] | None
    body: bytes


class FullStack:
    def __init__(
        self,
        directory: Path,
        workers: list[Worker],
        *,
        model: str = "tiny",
        model_dir: Path | None = None,
        settings: dict[str, Any] | None = None,
        pool: dict[str, Any] | None = None,
        change_envoy: Callable[[dict[str, Any]], None] = lambda bootstrap: None,
        program: Sequence[str] = (sys.executable, "-m", "extproc"),
    ) -> None:
        require_envoy()
        self.directory = directory
        self._change_envoy = change_envoy
        self._program = tuple(program)
        self.model = model
        self.decisions = directory / "decisions.jsonl"
        self._lines = DecisionLines(self.decisions)
        self._port = free_port()
        self.settings: dict[str, Any] = {
            "listen": f"127.0.0.1:{self._port}",
            "admin": {"listen": "127.0.0.1:0"},  # the usual one may be another test's
            "seed": 1,
            "decision_log": {"path": str(self.decisions)},
            "scrape": {"interval_s": 0.3},
            "limits": {"prompt_budget_ms": 5_000},
            "envoy": {"message_timeout_s": 10},  # a loaded test machine must not make requests go unrouted
            "pools": [
                {
                    "model": {"path": str(model_dir or tiny_model_path()), "names": [model]},
                    "discovery": {
                        "static": [
                            {"endpoint": w.endpoint, "kv_events": w.kv_events, "kv_replay": w.kv_replay}
                            for w in workers
                        ]
                    },
                    **(pool or {}),
                }
            ],
            **(settings or {}),
        }
        self.config_file = directory / "warmroute.yaml"
        self.router: ChildProcess
        self.envoy: EnvoyProcess
        self.session: aiohttp.ClientSession
        self._stack = contextlib.AsyncExitStack()
        self._starts = 0

    async def __aenter__(self) -> Self:
        try:
            self.config_file.write_text(yaml.safe_dump(self.settings), encoding="utf-8")
            await self.start_router()
            self._stack.push_async_callback(self.stop_router)
            settings = on_loopback(envoy_settings(configuration.load(self.config_file)))
            config = bootstrap(settings)
            self._change_envoy(config)
            self.envoy = EnvoyProcess(config, self.directory)
            await self._stack.enter_async_context(self.envoy)
            timeout = aiohttp.ClientTimeout(total=120)
            connector = aiohttp.TCPConnector(limit=0)
            self.session = await self._stack.enter_async_context(
                aiohttp.ClientSession(self.envoy.url, timeout=timeout, connector=connector)
            )
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start_router(self) -> None:
        """Start `warmroute serve` (again) and wait until it listens."""
        self._starts += 1
        log = self.directory / f"router-{self._starts}.log"
        command = [*self._program, "serve", "-c", str(self.config_file)]
        self.router = ChildProcess(command, log)
        await self.router.start()
        await self.until(lambda: "listening on" in self.router_log() or not self.router.running, START_S)
        assert self.router.running, self.router.log_tail()

    async def stop_router(self) -> None:
        await self.router.stop()

    def router_log(self) -> str:
        return self.router.log.read_text() if self.router.log.exists() else ""

    async def page(self, path: str) -> str:
        """A page of the router's admin server: `/metrics`, `/state`, …"""
        found = re.search(r"status page: (http://\S+)/", self.router_log())
        assert found is not None, self.router_log()
        async with self.session.get(found[1] + path) as reply:
            return await reply.text()

    async def until_subscribed(self, workers: int) -> None:
        """Wait until the KV events of so many workers are being received."""

        def subscribed() -> set[str]:
            lines = (line for line in self.router_log().splitlines() if "KV events of" in line)
            return {line.split("KV events of ")[1].split(": ")[0] for line in lines}

        await self.until(lambda: len(subscribed()) >= workers)

    async def until(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, f"not in time; router log:\n{self.router.log_tail()}"
            await asyncio.sleep(0.01)

    async def until_warm(self, prompt: str) -> dict[str, Any]:
        """Ask it again until it is predicted to be warm; the log line of that request."""
        return await until_told(
            lambda: self._decision_of(prompt), lambda entry: entry["predicted_cached_tokens"], DEADLINE_S
        )

    async def _decision_of(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """Ask it; the log line of that request."""
        return await self.decision((await self.chat(prompt, **fields)).request_id)

    async def until_complete(self, workers: int) -> None:
        """Wait until so many workers' KV events are known to be complete; each must have published some."""
        await self.until(lambda: self.router_log().count(": complete (") >= workers)

    async def until_idle(self) -> None:
        """Wait until a decision sees no lease on any worker, and see that none had to be written off."""
        await until_told(
            lambda: self._decision_of("Anybody there?", max_tokens=1),
            lambda entry: not any(candidate["active"] for candidate in entry["candidate_workers"]),
            DEADLINE_S,
        )
        assert [e for e in self.log_entries().values() if e["outcome"] == "lost"] == []

    # --- requests ------------------------------------------------------------------------------------

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        """One request through Envoy; streams are read to their end."""
        request_id = str(uuid.uuid4())
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"content-type": "application/json", "x-request-id": request_id, **(headers or {})}
        # As a file: aiohttp warns of large bytes.
        async with self.session.post(path, data=io.BytesIO(data), headers=all_headers) as reply:
            raw = await reply.read()
            kind = reply.headers.get("content-type", "")
            text, usage = _read_stream(raw) if "event-stream" in kind else _read_json(raw)
            return Reply(reply.status, request_id, text, usage, raw)

    async def chat(
        self, messages: list[dict[str, Any]] | str, *, stream: bool = False, **fields: Any
    ) -> Reply:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": self.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any, **fields: Any) -> Reply:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return await self.post("/v1/completions", body)

    # --- the decision log ----------------------------------------------------------------------------

    def log_entries(self) -> dict[str, dict[str, Any]]:
        """Lines so far, by request id."""
        if self._lines.path != self.decisions:
            self._lines = DecisionLines(self.decisions)
        return self._lines.entries()

    async def decision(self, request_id: str) -> dict[str, Any]:
        """The line of one request, once it is there."""
        await self.until(lambda: request_id in self.log_entries())
        return self.log_entries()[request_id]


def _read_json(raw: bytes) -> tuple[str, dict[str, Any] | None]:
    try:
        document = json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace"), None
    if not isinstance(document, dict):
        return "", None
    choices = document.get("choices") or [{}]
    message = choices[0].get("message") or {}
    return str(message.get("content") or choices[0].get("text") or ""), document.get("usage")


def _read_stream(raw: bytes) -> tuple[str, dict[str, Any] | None]:
    text, usage = "", None
    for line in raw.splitlines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                text += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            usage = event.get("usage") or usage
    return text, usage
