"""What watching costs a request: `python -m tests.bench.bench_telemetry`.

Requests go through the whole routing service (parse, render, tokenize, match, decide, and their end), with
nothing watched, with metrics, and with metrics and spans. Modes take turns, so that they meet the same noise,
and processor time is measured, which others on the machine do not take; the median of each is compared with
that of the first, in the same run.
"""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from extproc.adapters.decision_writer import DecisionLog
from extproc.adapters.prompt_service import PromptService
from extproc.adapters.request_preparation import PoolContext
from extproc.adapters.routing import HttpRequest
from extproc.adapters.routing_service import WarmRoutingService
from extproc.adapters.telemetry.recorder import Telemetry
from extproc.adapters.telemetry.spans import Spans
from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.policies.token_load import TokenLoad
from extproc.core.router import Router
from extproc.core.types import Completion, Outcome
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.ext_proc_messages import Route
from tests.support.core import members, metrics

WORKERS, ROUNDS, REQUESTS = 8, 60, 40


class Unwatched(Telemetry):
    """Takes no notice of anything."""

    def decided(self, *_: Any) -> dict[str, str]:
        return {}

    def finished(self, *_: Any) -> None:
        pass


class Nowhere(SpanExporter):
    """Spans are made and batched, and go nowhere: the network is not ours to measure."""

    def export(self, _spans: Sequence[Any]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def service(
    telemetry: Telemetry | None, encoder: PromptEncoder, log: DecisionLog | None = None
) -> WarmRoutingService:
    """A routing service of its own in front of idle workers."""
    ids = itertools.count()
    router = Router(
        TokenLoad(CostSettings()),
        Random(1),
        new_lease_id=lambda: f"lease-{next(ids)}",
        pools={"default": PoolFacts("", encoder.tokenizer_revision, 16)},
    )
    router.on_membership(members(WORKERS), time.monotonic())
    for member in members(WORKERS):
        router.on_metrics(member.endpoint, {0: metrics()}, time.monotonic())
    context = PoolContext("default", PromptService(encoder), "", encoder.tokenizer_revision, {"tiny"})
    return WarmRoutingService(
        router,
        {"default": context},
        log or DecisionLog("", print),
        time.monotonic,
        fallback_count=3,
        telemetry=telemetry,
    )


def requests(rng: Random) -> list[HttpRequest]:
    """Chats of some 300 tokens, in four families that share a system prompt."""
    made = []
    for number in range(REQUESTS):
        system = f"System prompt {number % 4}. " * 40
        question = " ".join(str(rng.random()) for _ in range(5))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": "tiny", "stream": True, "max_tokens": 64, "messages": messages}
        path = "/v1/chat/completions"
        made.append(HttpRequest("POST", path, {}, json.dumps(body).encode(), None, None, f"request-{number}"))
    return made


async def once(watched: WarmRoutingService, todo: list[HttpRequest]) -> float:
    """Microseconds of processor time per request, from its arrival to its end."""
    began = time.process_time()
    for one in todo:
        answer = await watched.route(one)
        if not isinstance(answer, Route):
            raise TypeError(f"not routed: {answer}")
        done = Completion(
            Outcome.FINISHED,
            answer.endpoints[0],
            200,
            1,
            first_body_ms=50.0,
            upstream_first_body_ms=45.0,
            duration_ms=500.0,
            prompt_tokens=300,
            cached_tokens=0,
            output_tokens=64,
        )
        watched.completed(answer.lease_id, done)
    return (time.process_time() - began) / len(todo) * 1e6


async def compare(modes: dict[str, Callable[[], Telemetry]]) -> None:
    """Print each mode's median, and its ratio to the first."""
    encoder = PromptEncoder.load(tiny_model_path())
    services = {name: service(make(), encoder) for name, make in modes.items()}
    times: dict[str, list[float]] = {name: [] for name in modes}
    rng = Random(2)
    for _ in range(ROUNDS):
        todo = requests(rng)
        for name in rng.sample(list(services), len(services)):
            times[name].append(await once(services[name], todo))
    first = statistics.median(next(iter(times.values())))
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:28s} {median:7.1f} us per request   ratio {median / first:.3f}")


def main() -> None:
    """Run it."""
    providers = [
        TracerProvider(sampler=sampler, shutdown_on_exit=False) for sampler in (ALWAYS_OFF, ALWAYS_ON)
    ]
    for provider in providers:
        provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    off, on = (Spans(provider.get_tracer("bench")) for provider in providers)
    asyncio.run(
        compare(
            {
                "nothing watched": Unwatched,
                "metrics, tracing off": Telemetry,
                "metrics, no request sampled": lambda: Telemetry(spans=off),
                "metrics, every request traced": lambda: Telemetry(spans=on),
            }
        )
    )
    for provider in providers:
        provider.shutdown()


if __name__ == "__main__":
    main()
