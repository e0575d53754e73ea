"""The engines everything in a run is compared on: started once, emptied between runs."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.adapters.child_process import ChildError, ChildProcess
from extproc.adapters.envoy_process import EnvoyProcess
from extproc.core.errors import WarmrouteError
from extproc.demo import vllm_command
from loadtests.live.envoy_plain import trivial_engine
from loadtests.live.http1 import HttpError, Pool, encode, post_json

MODEL = "tiny"
_POLL_S = 0.05
_START_S = 300.0


class FleetError(WarmrouteError):
    """An engine does not do what the benchmark needs; the message says which and what."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine. KV endpoints are None where it publishes no events."""

    endpoint: str
    kv_events: str | None
    kv_replay: str | None
    command: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """All of them. `block_size` in tokens."""

    kind: str
    engines: tuple[Engine, ...]
    block_size: int

    @property
    def endpoints(self) -> list[str]:
        """`ip:port` of each."""
        return [engine.endpoint for engine in self.engines]

    async def reset(self) -> None:
        """Empty every prefix cache, and make each engine publish that it did.

        Engines refuse while requests hold blocks, and say so in their KV events only with the next step.

        Raises:
            FleetError: an engine could not be emptied.
        """
        await asyncio.gather(*(_reset(engine.endpoint) for engine in self.engines))


async def _reset(endpoint: str) -> None:
    deadline = time.monotonic() + 30.0
    async with Pool(endpoint) as pool:
        while True:
            answer = await pool.request(encode("POST", "/reset_prefix_cache", endpoint))
            if answer.status == 200 and refused(answer.body) is False:
                break
            if answer.status != 200 or time.monotonic() > deadline:
                raise FleetError(
                    f"{endpoint}/reset_prefix_cache answered {answer.status} {answer.body[:100]!r}; "
                    "vLLM has it with VLLM_SERVER_DEV_MODE=1"
                )
            await asyncio.sleep(_POLL_S)
        body = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}).encode()
        await post_json(pool, "/v1/completions", body)


def refused(body: bytes) -> bool:
    """Whether an engine says that it did not empty its cache. Some say nothing when they did."""
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.get("success") is False


Starter = Callable[[contextlib.AsyncExitStack, Path], Awaitable[Fleet]]


def trivial_answers() -> dict[str, str]:
    """What the trivial engine says, by path: a finished chat, and what routers ask before they send any."""
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 1,
        "total_tokens": 101,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    message = {"role": "assistant", "content": "Yes."}
    chat = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }
    card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "bench", "max_model_len": 1 << 20}
    return {
        "": json.dumps(chat),
        "/health": "{}",
        "/v1/models": json.dumps({"object": "list", "data": [card]}),
        "/version": json.dumps({"version": "0.32.0"}),
        "/metrics": (
            'vllm:num_requests_running{engine="0",model_name="tiny"} 0\n'
            'vllm:num_requests_waiting{engine="0",model_name="tiny"} 0\n'
            'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0\n'
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096",engine="0"} 1\n'
        ),
    }


async def start_trivial(stack: contextlib.AsyncExitStack, directory: Path, count: int) -> Fleet:
    """`count` upstreams that answer at once."""
    engines = []
    for number in range(count):
        folder = directory / f"trivial-{number}"
        folder.mkdir()
        envoy = EnvoyProcess(trivial_engine(trivial_answers()), folder, log_level="warning")
        await stack.enter_async_context(envoy)
        engines.append(Engine(envoy.address, None, None, "envoy answering by itself (envoy_plain.py)"))
    return Fleet("trivial", tuple(engines), 16)


async def start_simulated(
    stack: contextlib.AsyncExitStack, directory: Path, count: int, options: Sequence[str], block_size: int
) -> Fleet:
    """`count` times `warmroute engine` with these options."""

    async def one(number: int) -> Engine:
        command = [*(sys.executable, "-m", "extproc", "engine", "--port", "0"), *options]
        command += ["--block-size", str(block_size), "--seed", str(number)]
        child = ChildProcess(command, directory / f"engine-{number}.log")
        await stack.enter_async_context(child)
        ready = json.loads(await line_of(child, lambda text: text.startswith("{")))
        shown = " ".join(["warmroute", *command[3:]])
        return Engine(f"127.0.0.1:{ready['port']}", ready["kv_events"], ready["kv_replay"], shown)

    return Fleet("simulated", tuple(await _together([one(number) for number in range(count)])), block_size)


async def start_vllm(
    stack: contextlib.AsyncExitStack, directory: Path, count: int, python: str, blocks: int
) -> Fleet:
    """`count` real vLLM replicas whose caches hold `blocks` blocks of 32 tokens."""

    async def one(number: int) -> Engine:
        command, environment = vllm_command.build(python, directory / f"vllm-{number}", blocks)
        at = command.index("--max-model-len") + 1
        # The engine refuses to start if one sequence of full length does not fit; one block is kept back.
        command[at] = str(min(int(command[at]), (blocks - 1) * vllm_command.CPU_BLOCK_SIZE))
        endpoint, events, replay = vllm_command.endpoints(command)
        child = ChildProcess(
            command, directory / f"engine-{number}.log", env={**environment, "VLLM_SERVER_DEV_MODE": "1"}
        )
        stack.callback(_end_group, child)  # after the server has ended: its engine core may outlive it
        await stack.enter_async_context(child)
        await answers(child, endpoint, encode("GET", "/health", endpoint))
        return Engine(endpoint, events, replay, vllm_shown(command))

    # Importing takes most of the start, and two at once already use both cores of a small machine.
    engines: list[Engine] = []
    for start in range(0, count, 2):
        engines += await _together([one(n) for n in range(start, min(start + 2, count))])
    return Fleet("vLLM", tuple(engines), vllm_command.CPU_BLOCK_SIZE)


def _end_group(child: ChildProcess) -> None:
    if child.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # children lead sessions, so groups, of their own


async def _together(starting: Sequence[Coroutine[Any, Any, Engine]]) -> list[Engine]:
    """All of them; when one does not start, none is left starting."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in starting]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def vllm_shown(command: Sequence[str]) -> str:
    """The command line as a reader would type it."""
    words = list(command[command.index("serve") :])
    words[1] = "MODEL"
    return " ".join(["vllm", *(f"'{word}'" if "{" in word else word for word in words)])


async def line_of(child: ChildProcess, wanted: Callable[[str], bool]) -> str:
    """The first line of a child's output that is `wanted`.

    Raises:
        ChildError: it ended before.
    """
    deadline = time.monotonic() + _START_S
    while True:
        text = child.log.read_text(encoding="utf-8", errors="replace") if child.log.exists() else ""
        complete = text[: text.rfind("\n") + 1].splitlines()
        line = next((line for line in complete if wanted(line)), None)
        if line is not None:
            return line
        if not child.running or time.monotonic() > deadline:
            raise ChildError(f"{' '.join(child.command[:4])} did not start:\n{child.log_tail()}")
        await asyncio.sleep(_POLL_S)


async def answers(child: ChildProcess, address: str, request: bytes) -> None:
    """Wait until `address` answers `request` with 200.

    Raises:
        ChildError: the process ended, or it takes too long.
    """
    deadline = time.monotonic() + _START_S
    async with Pool(address) as pool:
        while True:
            with contextlib.suppress(OSError, HttpError, TimeoutError):
                async with asyncio.timeout(5.0):
                    if (await pool.request(request)).status == 200:
                        return
            if not child.running or time.monotonic() > deadline:
                raise ChildError(f"{' '.join(child.command[:2])} did not start:\n{child.log_tail()}")
            await asyncio.sleep(_POLL_S)


def scratch(directory: Path, name: str) -> Path:
    """A new empty folder in `directory`."""
    number = 0
    while True:
        folder = directory / f"{name}-{number}"
        if not folder.exists():
            folder.mkdir(parents=True)
            return folder
        number += 1
