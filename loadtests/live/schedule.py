"""What is sent and when, and what is made of the times. Pure.

Open loop: requests are sent at times fixed beforehand, whether or not earlier ones have been answered, and
latency counts from the time a request *should* have been sent. A proxy that stalls is then charged for every
request that had to wait meanwhile (no coordinated omission).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from extproc.demo.results import percentile
from extproc.demo.workload import prose

PROMPT_SIZES = {"2 KB": 2 << 10, "128 KB": 128 << 10}
SHARED = "shared"
UNIQUE = "unique"
_DOCUMENTS = 8
_MARK = "<number>"


@dataclass(frozen=True, slots=True)
class Load:
    """A kind of prompt: its size in bytes, and whether prompts share documents or have nothing in common."""

    size: str
    kind: str

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.size}, {self.kind}"


LOADS = tuple(Load(size, kind) for size in PROMPT_SIZES for kind in (SHARED, UNIQUE))


def arrivals(rate: float, seconds: float, rng: Random) -> list[float]:
    """Poisson arrival times of `rate` requests per second, in seconds from the start.

    Raises:
        ValueError: a rate or duration of 0 or less.
    """
    if not rate > 0 or not seconds > 0:
        raise ValueError(f"{rate} requests/s for {seconds} s: both must be above 0")
    times: list[float] = []
    at = rng.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def templates(load: Load, count: int, model: str, rng: Random) -> list[tuple[bytes, bytes]]:
    """`count` chat requests whose prompts have about the size of `load`, each in two parts.

    What is put between the parts (`fill`) makes them all different. Shared: eight documents, and a question
    that differs. Unique: not even the first words agree.
    """
    size = PROMPT_SIZES[load.size]
    text = prose(rng, max(size, 16_384))
    documents = [_cut(text, size, rng) for _ in range(_DOCUMENTS)]
    out = []
    for number in range(count):
        shared = load.kind == SHARED
        document = documents[number % _DOCUMENTS] if shared else f"{_MARK} {_cut(text, size, rng)}"
        question = f"Question {_MARK if shared else ''}: {prose(rng, 8)}"
        messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
        before, _, after = json.dumps(body).partition(_MARK)
        out.append((before.encode(), after.encode()))
    return out


def fill(template: tuple[bytes, bytes], number: int) -> bytes:
    """A complete body; another number, another body."""
    # Spread: consecutive numbers share their first digits, which would be a shared prefix.
    return template[0] + b"%x" % (number * 0x9E3779B1 & 0xFFFFFFFF) + template[1]


def _cut(text: str, size: int, rng: Random) -> str:
    start = rng.randrange(len(text))
    doubled = text[start:] + text[:start]
    while len(doubled) < size:
        doubled += text
    return doubled[:size]


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of one run in milliseconds; requests sent and failed."""

    p50: float
    p95: float
    p99: float
    requests: int
    failed: int


def latency(times_ms: Sequence[float], failed: int) -> Latency | None:
    """Of the requests that succeeded; None if none did."""
    shares = [percentile(times_ms, share) for share in (0.50, 0.95, 0.99)]
    if any(value is None for value in shares):
        return None
    p50, p95, p99 = (float(value) for value in shares if value is not None)
    return Latency(p50, p95, p99, len(times_ms) + failed, failed)


def rotated(items: Sequence[str], round_number: int) -> list[str]:
    """The order of targets in a round: each begins once, so that none is always the first or the last."""
    if not items:
        return []
    shift = round_number % len(items)
    return [*items[shift:], *items[:shift]]
