"""Logs of chat requests with a breaker planted in each prompt, for `warmroute analyze`.

    log = planted_log("timestamp", requests=40, seed=1)
    log.bodies      # chat bodies
    log.plants      # per body: the text that breaks it, as it stands in the prompt

Every prompt is rules, then (with the plant before, inside or among it) one of a few documents, then a
question whose first letter no other has. So what two prompts share, but for the plant, ends with the
document.

Run as a module it writes a long mixed log:

    python -m tests.support.planted_log 1000000 | warmroute analyze -
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

WORDS = (  # noqa: SIM905 - a list of so many words is easier to read as text
    "river stone garden window paper silver morning forest letter market winter engine summer harbour valley"
    " copper candle mirror bridge island meadow ladder basket thunder pocket blanket shadow orchard needle"
).split()
STARTS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789?!&%$#@*+=~<>;:"
"""First letters of questions, each a token of its own."""


@dataclass(slots=True)
class PlantedLog:
    bodies: list[dict[str, Any]] = field(default_factory=list)
    plants: list[str] = field(default_factory=list)

    def lines(self) -> list[bytes]:
        return [json.dumps(body, ensure_ascii=False).encode() + b"\n" for body in self.bodies]


SYLLABLES = (
    "ba",
    "den",
    "fi",
    "gor",
    "hul",
    "jam",
    "kes",
    "lim",
    "nor",
    "pat",
    "qua",
    "res",
    "sol",
    "tam",
    "ven",
)
VOCABULARY = [one + two + three for one in SYLLABLES for two in SYLLABLES for three in ("", "s", "en", "ing")]


def words(rng: Random, count: int, vocabulary: list[str] = WORDS) -> str:
    return " ".join(rng.choices(vocabulary, k=count))


def hexadecimal(rng: Random, digits: int) -> str:
    return f"{rng.getrandbits(digits * 4):0{digits}x}"


def _timestamp(rng: Random) -> str:
    return (
        f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T"
        f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}Z"
    )


VALUES: dict[str, tuple[str, Callable[[Random], str]]] = {
    "timestamp": ("Current time: ", _timestamp),
    "date": ("Today is ", lambda rng: f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"),
    "uuid": ("Request ", lambda rng: str(UUID(int=rng.getrandbits(128), version=4))),
    "identifier": ("Trace ", lambda rng: hexadecimal(rng, 32)),
    "user name": ("User: ", lambda rng: f"{rng.choice(WORDS).title()} {rng.choice(WORDS).title()}"),
    "counter": ("Turn number ", lambda rng: str(rng.randint(1, 9999))),
}
"""Kinds of plants that are values: what stands before the value, and the value."""


def planted_log(kind: str, *, requests: int = 40, documents: int = 4, seed: int = 0) -> PlantedLog:
    """One of `VALUES`, or "fragment order", "key order", "white space", "none"."""
    rng = Random(seed)
    rules = "Answer from the document alone.\n" + words(rng, 40) + ".\n"
    texts = [words(rng, 160) for _ in range(documents)]
    fragments = [[f"{words(rng, 40)}.\n" for _ in range(4)] for _ in range(documents)]
    log = PlantedLog()
    for start in STARTS[:requests]:
        number = rng.randrange(documents)
        question = f"\n---\n{start} {words(rng, 8)}"
        plant = ""
        if kind in VALUES:
            before, value = VALUES[kind]
            plant = value(rng)
            system = f"{rules}{before}{plant}\n{texts[number]}"
        elif kind == "fragment order":
            order = fragments[number][:]
            rng.shuffle(order)
            plant = "".join(order)
            system = f"{rules}{plant}{words(Random(number), 30)}"
        elif kind == "key order":
            keys = [(word, words(Random(word), 4)) for word in WORDS[:8]]
            rng.shuffle(keys)
            plant = json.dumps(dict(keys))
            system = f"{rules}{plant}\n{texts[number]}"
        elif kind == "white space":
            plant = rng.choice(["\n", "\r\n", " \n"])
            system = f"{rules}{plant.join(words(Random(number * 100 + at), 20) for at in range(8))}"
        else:
            system = f"{rules}{texts[number]}"
        log.plants.append(plant)
        log.bodies.append(
            {
                "model": "planted",
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": question},
                ],
            }
        )
    return log


def many_lines(count: int, seed: int = 0, tenants: int = 50) -> Iterator[bytes]:
    """Any number of lines of a mixed log: shared templates, documents, conversations, unique prompts."""
    rng = Random(seed)
    systems = [words(Random(at), 40, VOCABULARY) for at in range(20)]
    sessions: list[list[dict[str, str]]] = []
    for number in range(count):
        draw = rng.random()
        system = {"role": "system", "content": systems[min(19, int(rng.expovariate(0.3)))]}
        if draw < 0.35 and sessions:
            messages = sessions[rng.randrange(len(sessions))]
            messages += [
                {"role": "assistant", "content": words(rng, 10, VOCABULARY)},
                {"role": "user", "content": words(rng, 8, VOCABULARY)},
            ]
            if len(messages) > 16:
                sessions.remove(messages)
        elif draw < 0.65:
            document = words(Random(1000 + int(rng.paretovariate(0.5)) % 5000), 50, VOCABULARY)
            stamp = f"Time: {_timestamp(rng)}\n" if rng.random() < 0.3 else ""
            messages = [
                system,
                {"role": "user", "content": f"{stamp}{document}\n{words(rng, 8, VOCABULARY)}"},
            ]
        else:
            messages = [system, {"role": "user", "content": words(rng, 15, VOCABULARY)}]
            sessions.append(messages)
            if len(sessions) > 500:
                sessions.pop(0)
        line = {
            "timestamp": 1_790_000_000 + number * 0.05,
            "tenant": f"tenant-{rng.randrange(tenants)}",
            "request": {"model": "mixed", "messages": messages},
        }
        yield json.dumps(line).encode() + b"\n"


if __name__ == "__main__":
    for line in many_lines(int(sys.argv[1])):
        sys.stdout.buffer.write(line)
