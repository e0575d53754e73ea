"""What is compared: each target is started in front of a fleet and gives one address to send requests to."""

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from extproc.adapters.child_process import ChildError, ChildProcess
from extproc.adapters.envoy_bootstrap import bootstrap
from extproc.adapters.envoy_process import EnvoyProcess
from extproc.prompt.tiny import tiny_model_path
from loadtests.live import peers
from loadtests.live.envoy_plain import proxy
from loadtests.live.fleet import MODEL, Fleet, answers, line_of, scratch
from loadtests.live.http1 import encode
from loadtests.live.ports import free_ports

ENVOY_THREADS = 2
"""As many as the machine of the published figures has cores; the other proxies take all there are."""
_CATCH_UP_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A way to the engines.

    Attributes:
        name: what reports call it.
        kind: direct, envoy, trivial, warmroute or rust.
        policy: load balancing policy, in the target's own words.
        router: of a Rust router, which one.
    """

    name: str
    kind: str
    policy: str = ""
    router: peers.RustRouter | None = None


DIRECT = Target("direct", "direct")
ENVOY = Target("Envoy", "envoy", "ROUND_ROBIN")
ROUND_ROBIN = Target("Envoy round robin", "envoy", "ROUND_ROBIN")
TRIVIAL = Target("Envoy + trivial processor", "trivial", "ROUND_ROBIN")
WARMROUTE = Target("Envoy + Warmroute", "warmroute", "token-load")


def rust_targets(policy: str) -> list[Target]:
    """Every Rust router with this policy."""
    return [Target(f"{router.name} {policy}", "rust", policy, router) for router in peers.RUST_ROUTERS]


async def _at_once() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Running:
    """A target that takes requests at `address`.

    `decisions` is Warmroute's decision log. `settled` waits until it knows that the engines are empty.
    """

    target: Target
    address: str
    command: str
    decisions: Path | None = None
    settled: Callable[[], Awaitable[None]] = _at_once


@contextlib.asynccontextmanager
async def running(
    target: Target, fleet: Fleet, directory: Path, peers_venv: str | None
) -> AsyncIterator[Running]:
    """The target in front of `fleet`, ready; everything that was started for it ends with the context.

    Raises:
        ChildError: something did not start, or is not installed.
    """
    folder = scratch(directory, re.sub(r"[^a-z0-9]+", "-", target.name.lower()))
    async with contextlib.AsyncExitStack() as stack:
        match target.kind:
            case "direct":
                yield Running(target, fleet.endpoints[0], "(no proxy)")
            case "envoy":
                config = proxy(fleet.endpoints, lb_policy=target.policy)
                yield Running(target, await _envoy(stack, config, folder), _envoy_shown())
            case "trivial":
                command = [sys.executable, "-m", "loadtests.live.trivial_processor"]
                child = ChildProcess(command, folder / "processor.log")
                await stack.enter_async_context(child)
                listening = await line_of(child, lambda line: "listening on " in line)
                config = proxy(
                    fleet.endpoints, lb_policy=target.policy, processor=listening.rsplit(" ", 1)[1]
                )
                address = await _envoy(stack, config, folder)
                yield Running(
                    target, address, f"python -m loadtests.live.trivial_processor; {_envoy_shown()}"
                )
            case "warmroute":
                yield await _warmroute(stack, target, fleet, folder)
            case _:
                yield await _rust(stack, target, fleet, folder, peers_venv)


async def _envoy(stack: contextlib.AsyncExitStack, config: dict[str, Any], folder: Path) -> str:
    envoy = EnvoyProcess(config, folder, log_level="warning", concurrency=ENVOY_THREADS)
    await stack.enter_async_context(envoy)
    return envoy.address


def _envoy_shown() -> str:
    return f"envoy --config-path envoy.json --concurrency {ENVOY_THREADS}"


def warmroute_config(target: Target, fleet: Fleet, decisions: Path) -> dict[str, Any]:
    """What a user would write for this fleet; everything else is default."""
    events = fleet.engines[0].kv_events is not None
    return {
        "listen": "127.0.0.1:0",
        "policy": target.policy,
        "decision_log": {"path": str(decisions)},
        "pools": [
            {
                "model": {"path": str(tiny_model_path()), "names": [MODEL]},
                "block_size": fleet.block_size,
                "kv_events": {"enabled": events},
                "discovery": {
                    "static": [
                        {"endpoint": engine.endpoint}
                        | ({"kv_events": engine.kv_events, "kv_replay": engine.kv_replay} if events else {})
                        for engine in fleet.engines
                    ]
                },
            }
        ],
    }


async def _warmroute(stack: contextlib.AsyncExitStack, target: Target, fleet: Fleet, folder: Path) -> Running:
    from extproc import config as configuration
    from extproc.cli.envoy_config import envoy_settings

    decisions = folder / "decisions.jsonl"
    path = folder / "warmroute.yaml"
    written = warmroute_config(target, fleet, decisions)
    path.write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")
    child = ChildProcess([sys.executable, "-m", "extproc", "serve", "-c", str(path)], folder / "router.log")
    await stack.enter_async_context(child)
    listening = await line_of(child, lambda line: "listening on " in line)
    router = listening.rsplit("listening on ", 1)[1].strip()
    # Envoy's side of it exactly as `warmroute envoy-config` makes it, on free ports.
    written["envoy"] = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "router": [router]}
    settings = envoy_settings(configuration.parse(json.dumps(written)))
    address = await _envoy(stack, bootstrap(settings), folder)
    shown = f"warmroute serve -c warmroute.yaml (policy {target.policy}); {_envoy_shown()}"
    followed = 0 if fleet.engines[0].kv_events is None else len(fleet.engines)
    return Running(target, address, shown, decisions, lambda: _complete(child, followed))


async def _complete(child: ChildProcess, engines: int) -> None:
    """Wait until the router has caught up with the KV events of so many engines."""
    deadline = time.monotonic() + _CATCH_UP_S
    while (
        len(complete := complete_workers(child.log.read_text(encoding="utf-8", errors="replace"))) < engines
    ):
        if not child.running or time.monotonic() > deadline:
            raise ChildError(f"KV events of {len(complete)} of {engines} are complete:\n{child.log_tail()}")
        await asyncio.sleep(0.05)


def complete_workers(log: str) -> set[str]:
    """Workers whose KV events the router follows without a gap, by the last that its log says of each."""
    last = dict(re.findall(r"KV events of (\S+): ((?:not )?complete)", log))
    return {worker for worker, state in last.items() if state == "complete"}


async def _rust(
    stack: contextlib.AsyncExitStack, target: Target, fleet: Fleet, folder: Path, venv: str | None
) -> Running:
    assert target.router is not None
    binary = peers.find(target.router, venv)
    if binary is None:
        raise ChildError(peers.why_absent(target.router, venv))
    port, metrics = free_ports(2)
    command = target.router.command(binary, port, metrics, fleet.endpoints, target.policy)
    child = ChildProcess(command, folder / "router.log", cwd=folder)
    await stack.enter_async_context(child)
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "ready?"}]}
    address = f"127.0.0.1:{port}"
    await answers(child, address, encode("POST", "/v1/chat/completions", address, json.dumps(body).encode()))
    shown = " ".join([target.router.program, *command[1:]])
    return Running(target, address, shown)
