"""Requests for calibrating and, others, for checking. Pure: one seed, one scenario.

Calibration varies one thing at a time: prompt length, cached length, batch size, context. The held-out
requests mix everything: lengths from hundreds to thousands of tokens, new prompts and continuations of
earlier ones, alone and several at once, so that some wait for others.
"""

import math
from array import array
from dataclasses import dataclass
from random import Random

from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig, EngineRequest
from extproc.sim.time_fit import FittedTime, Work, decode_work, first_token_work

TOKENS = range(300, 4000)
"""Ordinary ids of the small model that comes with the product; any tokens do."""
DECODE_TOKENS = 48
PAUSE_S = (0.02, 0.08)
"""Before every point and every moment: an engine that has just been idle is slower to answer, and requests
that come back to back would calibrate another machine than the one that is checked."""


@dataclass(frozen=True, slots=True)
class FirstTokenPoint:
    """Calibration: the first token of a lone prompt, some of which is cached."""

    prompt_tokens: int
    cached_tokens: int = 0

    def work(self, step_tokens: int) -> Work:
        """What is timed."""
        return first_token_work(self.prompt_tokens, self.cached_tokens, step_tokens)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Calibration: the time between tokens while `sequences` prompts of `context_tokens` are answered."""

    sequences: int
    context_tokens: int

    def work(self, step_tokens: int) -> Work:  # noqa: ARG002 - the same for every kind of point
        """What is timed: a step half way through the answers."""
        return decode_work([self.context_tokens + DECODE_TOKENS // 2] * self.sequences)


Point = FirstTokenPoint | DecodePoint


def calibration(longest: int, block_size: int) -> list[Point]:
    """What to measure of an engine that takes prompts of up to `longest` tokens."""
    lengths = [n for n in (16, 128, 512, 1024, 2048, 4096, 8192, 12_288) if n <= longest]
    warm = [
        (cached // block_size * block_size, new)
        for cached, new in ((1024, 16), (2048, 512), (4096, 16), (4096, 2048), (7680, 16), (7680, 400))
        if cached + new <= longest
    ]
    return [
        *(FirstTokenPoint(n) for n in lengths),
        *(FirstTokenPoint(cached + new, cached) for cached, new in warm if cached),
        *(DecodePoint(n, context) for n in (1, 4, 8) for context in (64, min(1024, longest // 2))),
    ]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One request of the check. `at` is in seconds from the beginning of its moment."""

    prompt: tuple[int, ...]
    output_tokens: int
    at: float


Moment = tuple[HeldOut, ...]
"""Requests that are in the engine together. The next moment begins when all of them are done."""


def held_out(requests: int, longest: int, seed: int) -> list[Moment]:
    """About `requests` requests of up to `longest` tokens, in moments of one to four."""
    rng = Random(seed)
    shortest = 256
    history: list[tuple[int, ...]] = []
    moments: list[Moment] = []
    while (left := requests - len(history)) > 0:
        moment = []
        for _ in range(min(left, rng.choice((1, 1, 1, 2, 3, 4)))):
            length = round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))
            prefix: tuple[int, ...] = ()
            if history and rng.random() < 0.5:
                earlier = rng.choice(history)
                prefix = earlier[: rng.randint(len(earlier) // 2, len(earlier))][: length - 1]
            prompt = prefix + tuple(rng.choices(TOKENS, k=length - len(prefix)))
            history.append(prompt)
            moment.append(HeldOut(prompt, rng.randint(1, 16), round(rng.uniform(0, 0.12), 3)))
        moments.append(tuple(sorted(moment, key=lambda one: one.at)))
    return moments


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the model says of one held-out request: milliseconds and tokens."""

    ttft_ms: float
    cached_tokens: int


def predict(moments: list[Moment], fitted: FittedTime, config: EngineConfig) -> list[Predicted]:
    """The engine model's answer, request by request, in order of moments.

    `config.time` is not used. What a request costs outside the engine's steps is paid before it is queued.
    """
    model = EngineModel(
        EngineConfig(
            block_size=config.block_size,
            num_gpu_blocks=config.num_gpu_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            time=fitted.time,
            emit_events=False,
        )
    )
    out: list[Predicted] = []
    now = 0.0
    for moment in moments:
        now = _play(model, moment, fitted, now, out)
    return out


def _play(model: EngineModel, moment: Moment, fitted: FittedTime, now: float, out: list[Predicted]) -> float:
    sent = {str(i): now + request.at for i, request in enumerate(moment)}
    arrivals = [
        (
            sent[str(i)] + fitted.outside_s(len(request.prompt)),
            EngineRequest.from_tokens(
                str(i),
                array("I", request.prompt),
                array("I", [0] * request.output_tokens),
                model.config,
            ),
        )
        for i, request in enumerate(moment)
    ]
    arrivals.sort(key=lambda one: one[0])
    first: dict[str, Predicted] = {}
    while arrivals or model.next_deadline() is not None:
        deadline = model.next_deadline()
        if arrivals and (deadline is None or arrivals[0][0] <= deadline):
            at, request = arrivals.pop(0)
            now = max(now, at)
            model.submit(request, now)
            continue
        assert deadline is not None
        now = deadline
        for result in model.tick(now):
            for token in result.first_tokens:
                name = token.request.request_id
                first[name] = Predicted((result.at - sent[name]) * 1000.0, token.cached_tokens)
    out += [first[str(i)] for i in range(len(moment))]
    return now


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, with mean ranks for ties.

    Raises:
        ValueError: fewer than two values, unequal lengths, or a constant list.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError("two lists of the same length, of at least two values, are needed")
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) + 1) / 2
    covariance = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    spread = math.sqrt(sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y))
    if not spread:
        raise ValueError("a constant list has no ranks")
    return covariance / spread


def _ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[start]]:
            for index in order[start:end]:
                ranks[index] = (start + end + 1) / 2
            start = end
    return ranks
