"""The demo's load: documents asked about again and again, and chats. Prints a line a round."""  # noqa: INP001

import argparse
import asyncio
import contextlib
import itertools
import time

import aiohttp

from extproc.demo.client import Client
from extproc.demo.results import percentile
from extproc.demo.workload import WorkloadSettings, build

PAUSE_S = 2.0


async def main() -> None:
    """Play one workload after the other, each with a new seed, until ended or `--rounds` are done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="base URL of the gateway")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--concurrency", type=int, default=6, help="users at once")
    parser.add_argument("--rounds", type=int, help="rounds to play; without end by default")
    args = parser.parse_args()
    await until_ready(args.url)
    for number in itertools.count(1) if args.rounds is None else range(1, args.rounds + 1):
        client = Client(args.url, args.model, args.concurrency, lambda: None)
        started = time.monotonic()
        workload = build(WorkloadSettings(questions=8, document_words=1200, seed=number))
        result = await client.run(workload, "load")
        ttft = percentile(result.ttft_ms, 0.5)
        print(
            f"round {number}: {result.requests} requests in {time.monotonic() - started:.1f} s, "
            f"{len(result.failures)} failed, {result.cached_tokens} of {result.prompt_tokens} prompt tokens "
            f"cached, TTFT p50 {'-' if ttft is None else f'{ttft:.0f} ms'}",
            flush=True,
        )
        for failure in result.failures[:3]:
            print(f"  {failure}", flush=True)
        await asyncio.sleep(PAUSE_S)


async def until_ready(url: str) -> None:
    """Wait until the gateway has workers."""
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=5)) as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(1.0)


asyncio.run(main())
