"""What is asked while routers are restarted: questions on long documents, and chats that grow. Pure.

Everything is in balance at any moment, so that the share of cached tokens moves little by itself: each
document is asked about once a round, each chat has its turn once a round, and chats are of all ages. Where a
chat ends, another begins, which nobody can have cached. A chat's answers are written beforehand: turns do not
wait for each other.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from extproc.demo.workload import prose


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes. Words are about 1.3 tokens each; `cache_tokens` is what one engine can hold.

    `chat_share` of the requests are turns of chats.
    """

    documents: int
    document_words: int
    chats: int
    turns: int
    turn_words: int
    max_tokens: int
    cache_tokens: int
    chat_share: float = 0.4


FULL = Shape(24, 2400, 12, 8, 260, 12, 42_000)
"""Documents of about 4,000 tokens, chats of up to 3,500; one engine holds a third of it."""
QUICK = Shape(9, 500, 6, 4, 120, 4, 4_000)


def bodies(shape: Shape, model: str, seed: int) -> Iterator[bytes]:
    """Chat requests without end. The same seed, the same requests."""
    rng = Random(seed)
    documents = [
        f"Answer from this document, number {number}.\n\n{prose(rng, shape.document_words)}"
        for number in range(shape.documents)
    ]
    # Some are old, some young: else all would begin anew at once.
    chats = [_Chat(shape, rng, age=number % shape.turns) for number in range(shape.chats)]
    ask, talk = _rounds(shape.documents, rng), _rounds(shape.chats, rng)
    due = 0.0
    while True:
        due += shape.chat_share
        if due >= 1.0:
            due -= 1.0
            number = next(talk)
            if chats[number].over:
                chats[number] = _Chat(shape, rng, age=0)
            messages = chats[number].turn()
        else:
            question = f"{prose(rng, 12)} Is that so?"
            messages = [
                {"role": "system", "content": documents[next(ask)]},
                {"role": "user", "content": question},
            ]
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": shape.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield json.dumps(body).encode()


def _rounds(count: int, rng: Random) -> Iterator[int]:
    """All of `count` numbers, in a new order each round."""
    order = list(range(count))
    while True:
        rng.shuffle(order)
        yield from order


class _Chat:
    """One conversation with the answers it will have got; `age` turns of it are past."""

    def __init__(self, shape: Shape, rng: Random, age: int) -> None:
        self._shape, self._rng = shape, rng
        self._messages = [{"role": "system", "content": "You are a helpful assistant."}]
        self._turns = 0
        for _ in range(age):
            self.turn()

    @property
    def over(self) -> bool:
        """It has had all its turns."""
        return self._turns >= self._shape.turns

    def turn(self) -> list[dict[str, str]]:
        """The messages of the next request."""
        self._turns += 1
        self._messages.append({"role": "user", "content": prose(self._rng, self._shape.turn_words)})
        asked = list(self._messages)
        self._messages.append({"role": "assistant", "content": prose(self._rng, 10)})
        return asked
