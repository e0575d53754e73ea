"""Time a real engine, and compare with what the engine model predicts.

Machines are noisy: calibration and held-out requests are measured alternately, several times over. Whatever
else runs on the machine only adds time, so of each request the least time counts. Every round begins with an
empty prefix cache (`/reset_prefix_cache`, which vLLM has with `VLLM_SERVER_DEV_MODE=1`), so that what is
cached is known.
"""

import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from extproc.core.errors import WarmrouteError
from extproc.sim.engine_types import EngineConfig
from extproc.sim.time_fit import FittedTime, Observation, fit
from loadtests.fidelity.scenario import (
    DECODE_TOKENS,
    PAUSE_S,
    TOKENS,
    DecodePoint,
    FirstTokenPoint,
    Moment,
    Point,
    calibration,
    held_out,
    predict,
    rank_correlation,
)
from loadtests.live.http1 import Answer, Pool, encode, post_json


class MeasurementError(WarmrouteError):
    """The engine did not do what measuring it needs; the message says what."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One held-out request: what it was, what was measured (least of all rounds) and what was predicted."""

    prompt_tokens: int
    together: int  # requests of its moment
    cached_tokens: int
    predicted_cached_tokens: int
    ttft_ms: float
    predicted_ttft_ms: float

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive: predicted too long."""
        return self.predicted_ttft_ms / self.ttft_ms - 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one measurement."""

    fitted: FittedTime
    compared: tuple[Compared, ...]
    calibration_error: float  # median absolute relative error on the points the fit has seen

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of measured and predicted TTFT."""
        return rank_correlation(
            [one.ttft_ms for one in self.compared], [one.predicted_ttft_ms for one in self.compared]
        )

    @property
    def median_error(self) -> float:
        """Median absolute relative error of the predicted TTFT."""
        return statistics.median(abs(one.error) for one in self.compared)

    @property
    def p90_error(self) -> float:
        """90th percentile of it."""
        return statistics.quantiles([abs(one.error) for one in self.compared], n=10)[-1]


async def measure(
    address: str,
    config: EngineConfig,
    *,
    model: str = "tiny",
    requests: int = 60,
    rounds: int = 5,
    seed: int = 0,
    on_round: Callable[[int], None] = lambda _: None,
) -> Report:
    """Calibrate and check the engine at `address` (`host:port`), whose limits `config` states.

    Raises:
        MeasurementError: a request failed, or cached tokens were not what the design says.
        TimeFitError: see there.
    """
    if rounds < 1 or requests < 10:
        raise MeasurementError("measure at least 1 round of at least 10 requests")
    # Half of the cache, so that nothing is evicted between the prompts of one point.
    longest = min(config.max_model_len - 32, (config.num_gpu_blocks - 1) * config.block_size // 2, 12_288)
    points = calibration(longest, config.block_size)
    moments = held_out(requests, min(longest, 8_000), seed)
    rng = Random(seed)
    async with Pool(address) as pool:
        probe = _Probe(pool, model, rng)
        await probe.warm_up()
        seen: dict[Point, list[float]] = {point: [] for point in points}
        ttfts: list[list[float]] = []
        cached: list[int] = []
        for number in range(rounds):
            await probe.reset()
            for point in rng.sample(points, len(points)):
                seen[point].append(await probe.point(point))
            await probe.reset()
            answers = [answer for moment in moments for answer in await probe.moment(moment)]
            ttfts.append([_ttft_ms(answer) for answer in answers])
            cached = [_cached(answer) for answer in answers]
            on_round(number)
    return _report(config, seen, moments, ttfts, cached)


def _report(
    config: EngineConfig,
    seen: dict[Point, list[float]],
    moments: Sequence[Moment],
    ttfts: Sequence[Sequence[float]],
    cached: Sequence[int],
) -> Report:
    observations = [
        Observation(point.work(config.max_num_batched_tokens), min(values)) for point, values in seen.items()
    ]
    fitted = fit(observations)
    predicted = predict(list(moments), fitted, config)
    requests = [(request, len(moment)) for moment in moments for request in moment]
    least = [min(values) for values in zip(*ttfts, strict=True)]
    compared = tuple(
        Compared(len(request.prompt), together, real, model.cached_tokens, ms, model.ttft_ms)
        for (request, together), real, ms, model in zip(requests, cached, least, predicted, strict=True)
    )
    errors = [abs(fitted.predict_ms(one.work) / one.ms - 1.0) for one in observations]
    return Report(fitted, compared, statistics.median(errors))


class _Probe:
    """Asks one engine."""

    def __init__(self, pool: Pool, model: str, rng: Random) -> None:
        self._pool = pool
        self._model = model
        self._rng = rng

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(TOKENS, k=count)

    async def warm_up(self) -> None:
        """First requests are slow for reasons of their own."""
        for length in (16, 512, 2048):
            await self._ask(self._tokens(length), 8)
        await asyncio.gather(*(self._ask(self._tokens(16), 8) for _ in range(8)))

    async def reset(self) -> None:
        """Empty the prefix cache."""
        answer = await self._pool.request(encode("POST", "/reset_prefix_cache", self._pool.address))
        if answer.status != 200:
            raise MeasurementError(
                f"/reset_prefix_cache answered {answer.status}; run vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        await self._ask(self._tokens(8), 1)  # what was reset shows at the next step

    async def point(self, point: Point) -> float:
        """Milliseconds of one calibration point."""
        match point:
            case FirstTokenPoint(prompt, cached):
                prefix = self._tokens(cached)
                if cached:
                    await self._ask(prefix, 1)
                await self._pause()
                answer = await self._ask(prefix + self._tokens(prompt - cached), 1)
                if _cached(answer) != cached:
                    raise MeasurementError(f"{point}: {_cached(answer)} tokens were cached")
                return _ttft_ms(answer)
            case DecodePoint(sequences, context):
                prompts = [self._tokens(context) for _ in range(sequences)]
                await self._pause()
                answers = await asyncio.gather(*(self._ask(one, DECODE_TOKENS) for one in prompts))
                # From when all are running, to the end of the one that began last. Several tokens may come in
                # one piece, so single gaps say nothing.
                last = max(answers, key=lambda one: one.first_at)
                return (last.pieces[-1] - last.first_at) * 1000.0 / (DECODE_TOKENS - 1)

    async def moment(self, moment: Moment) -> list[Answer]:
        """All requests of a moment, each sent at its time."""
        loop = asyncio.get_running_loop()
        bodies = [self._body(list(one.prompt), one.output_tokens) for one in moment]
        await self._pause()
        start = loop.time()

        async def later(at: float, body: bytes) -> Answer:
            await asyncio.sleep(start + at - loop.time())
            return self._checked(await post_json(self._pool, "/v1/completions", body))

        return await asyncio.gather(*(later(one.at, body) for one, body in zip(moment, bodies, strict=True)))

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(*PAUSE_S))

    async def _ask(self, prompt: list[int], output_tokens: int) -> Answer:
        return self._checked(
            await post_json(self._pool, "/v1/completions", self._body(prompt, output_tokens))
        )

    def _body(self, prompt: list[int], output_tokens: int) -> bytes:
        body = {"model": self._model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()

    @staticmethod
    def _checked(answer: Answer) -> Answer:
        if answer.status != 200:
            raise MeasurementError(f"the engine answered {answer.status}: {answer.body[:300]!r}")
        return answer


def _ttft_ms(answer: Answer) -> float:
    return (answer.first_at - answer.sent_at) * 1000.0


def _cached(answer: Answer) -> int:
    for line in reversed(answer.body.splitlines()):
        if line.startswith(b"data: {"):
            usage = json.loads(line[6:]).get("usage")
            if usage:
                details = usage.get("prompt_tokens_details")
                if details is None:
                    raise MeasurementError("no cached tokens: run vLLM with --enable-prompt-tokens-details")
                return int(details.get("cached_tokens") or 0)
    raise MeasurementError(f"the answer has no usage: {answer.body[-300:]!r}")
