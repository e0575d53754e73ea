"""Drives one address: open loop for latency, closed loop for throughput."""

import asyncio
import gc
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from extproc.core.errors import WarmrouteError
from loadtests.live.http1 import HttpError, Pool, encode

PATH = "/v1/chat/completions"
_TIMEOUT_S = 30.0
Template = tuple[bytes, bytes]


class OpenLoop(NamedTuple):
    """Latencies in milliseconds since each request should have been sent; failed requests."""

    times_ms: list[float]
    failed: int


class Throughput(NamedTuple):
    """Answers per second, and requests that failed."""

    per_second: float
    failed: int


async def open_loop(address: str, requests: Sequence[bytes], times: Sequence[float]) -> OpenLoop:
    """Send `requests[i]` (made by `encode`) at `times[i]` seconds from now, come what may."""
    taken: list[float] = []
    failed = 0
    gc.collect()
    gc.disable()  # a collection in the client would be charged to the target
    try:
        async with Pool(address) as pool:
            start = time.perf_counter() + 0.01

            async def one(request: bytes, due: float) -> None:
                nonlocal failed
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        answer = await pool.request(request)
                except (OSError, HttpError, TimeoutError):
                    failed += 1
                    return
                if answer.status == 200:
                    taken.append((answer.ended_at - due) * 1000.0)
                else:
                    failed += 1

            async with asyncio.TaskGroup() as group:
                for request, at in zip(requests, times, strict=True):
                    due = start + at
                    await asyncio.sleep(due - time.perf_counter())
                    group.create_task(one(request, due))
    finally:
        gc.enable()
    return OpenLoop(taken, failed)


async def closed_loop(
    address: str, make: Callable[[int], bytes], concurrency: int, seconds: float
) -> Throughput:
    """As many requests as `concurrency` clients get answered; `make(i)` gives the i-th (made by `encode`)."""
    done = failed = sent = 0
    end = time.perf_counter() + seconds
    async with Pool(address) as pool:

        async def client() -> None:
            nonlocal done, failed, sent
            while time.perf_counter() < end:
                sent += 1
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        ok = (await pool.request(make(sent))).status == 200
                except (OSError, HttpError, TimeoutError):
                    ok = False
                done, failed = done + ok, failed + (not ok)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        took = time.perf_counter() - began
    return Throughput(done / took, failed)


def find_wrk() -> str | None:
    """wrk, the standard HTTP benchmark (Debian: `apt install wrk`); None if it is not there."""
    return shutil.which("wrk")


def throughput_tool(concurrency: int) -> str:
    """What measures throughput here."""
    return f"wrk -t1 -c{concurrency}" if find_wrk() else f"this client, {concurrency} at a time"


def wrk_script(templates: Sequence[Template], first: int) -> str:
    """A wrk script that sends these templates in turn, each time with another number in it.

    Scripts whose `first` differ by a million send different bodies.
    """
    parts = ",\n".join(f"  {{{_lua(before)}, {_lua(after)}}}" for before, after in templates)
    return f"""local templates = {{
{parts}
}}
local number = {first}
local headers = {{["content-type"] = "application/json"}}
request = function()
  number = number + 1
  local template = templates[number % #templates + 1]
  local mark = string.format("%x", (number * 40503) % 4294967291)
  return wrk.format("POST", "{PATH}", headers, template[1] .. mark .. template[2])
end
"""


def _lua(text: bytes) -> str:
    # JSON text from `json.dumps` is ASCII, and its strings are Lua strings: the escapes they share are kept.
    return json.dumps(text.decode("ascii"))


async def wrk(
    binary: str, address: str, text: str, script: Path, concurrency: int, seconds: float
) -> Throughput:
    """Throughput as wrk measures it. `text` is a script; `script` is where it may be written.

    Raises:
        WarmrouteError: wrk failed.
    """
    command = [
        *(binary, "-t1", f"-c{concurrency}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"),
        *("-s", str(script), f"http://{address}"),
    ]
    await asyncio.to_thread(script.write_text, text, encoding="ascii")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    return parse_wrk(output.decode(errors="replace"))


def parse_wrk(output: str) -> Throughput:
    """The figures of wrk's report. Answers that were errors are no throughput.

    Raises:
        WarmrouteError: it is not a report of wrk.
    """
    total = re.search(r"(\d+) requests in ([\d.]+)(ms|s|m)", output)
    if total is None:
        raise WarmrouteError(f"wrk printed no result:\n{output[-2000:]}")
    seconds = float(total[2]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[total[3]]
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    refused = int(bad[1]) if bad else 0
    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", output)
    broken = sum(int(number) for number in errors.groups()) if errors else 0
    return Throughput((int(total[1]) - refused) / seconds, refused + broken)


def request_bytes(address: str, body: bytes) -> bytes:
    """A chat request to `address`."""
    return encode("POST", PATH, address, body)
