"""What the simulated engine says: words that survive the way back.

A client of a chat sends the answer back with its next question. The engine finds the blocks it generated
only if that text is encoded to the very ids it produced. So answers are made of words that are one token
each, after a space and at the start of a text alike, joined by single spaces.
"""

import json
import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from extproc.core.errors import WarmrouteError

_MARKED_WORD = re.compile(r"[Ġ▁]([a-z]{2,12})")  # how byte-level and sentencepiece vocabularies spell a space
_ENOUGH = 4096
_TOO_FEW = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated ids and the text each of them adds. `stopped`: the last id is the end-of-text token."""

    token_ids: "array[int]"
    pieces: Sequence[str]
    stopped: bool


class Vocabulary:
    """Draws answers from a model's tokenizer, deterministically."""

    __slots__ = ("_eos", "_first_ids", "_next_ids", "_words")

    def __init__(
        self, words: Sequence[str], first_ids: Sequence[int], next_ids: Sequence[int], eos: int | None
    ) -> None:
        self._words = tuple(words)
        self._first_ids = tuple(first_ids)
        self._next_ids = tuple(next_ids)
        self._eos = eos

    @classmethod
    def load(cls, model_dir: Path) -> "Vocabulary":
        """Find the words of the tokenizer in `model_dir` that encode alike wherever they stand.

        Raises:
            WarmrouteError: there is no readable tokenizer, or it has too few such words.
        """
        path = model_dir / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for a missing or malformed file
            raise WarmrouteError(f"cannot read {path}: {error}") from error
        marked = {match[1] for token in tokenizer.get_vocab() if (match := _MARKED_WORD.fullmatch(token))}
        words = sorted(marked)[:_ENOUGH]
        alone = tokenizer.encode_batch(words, add_special_tokens=False)
        kept = [
            (word, encoding.ids[0]) for word, encoding in zip(words, alone, strict=True) if len(encoding) == 1
        ]
        if not kept:
            raise _too_few(path, 0)
        anchor, anchor_id = kept[0]
        pairs = tokenizer.encode_batch([f"{anchor} {word}" for word, _ in kept], add_special_tokens=False)
        found = [
            (word, first, pair.ids[1])
            for (word, first), pair in zip(kept, pairs, strict=True)
            if len(pair) == 2 and pair.ids[0] == anchor_id
        ]
        if len(found) < _TOO_FEW:
            raise _too_few(path, len(found))
        return cls(
            [word for word, _, _ in found],
            [first for _, first, _ in found],
            [following for _, _, following in found],
            _eos_id(model_dir),
        )

    def answer(
        self, seed: int, max_tokens: int, *, mean_tokens: float, min_tokens: int = 0, ignore_eos: bool = False
    ) -> Answer:
        """The answer for `seed`: exponentially distributed length, at most `max_tokens` ids.

        The end-of-text token counts as one, as in the engine. Without one in the model, or with
        `ignore_eos`, an answer is always `max_tokens` long.
        """
        rnd = random.Random(seed)  # noqa: S311 - noise, not secrets
        natural = max(min_tokens, 1, round(rnd.expovariate(1 / mean_tokens)))
        stopped = self._eos is not None and not ignore_eos and natural < max_tokens
        count = natural if stopped else max_tokens
        picks = rnd.choices(range(len(self._words)), k=count)
        ids = array("I", [self._next_ids[pick] for pick in picks])
        ids[0] = self._first_ids[picks[0]]
        pieces = [" " + self._words[pick] for pick in picks]
        pieces[0] = self._words[picks[0]]
        if stopped:
            assert self._eos is not None  # noqa: S101 - implied by `stopped`
            ids.append(self._eos)
            pieces.append("")
        return Answer(ids, pieces, stopped)


def _too_few(path: Path, count: int) -> WarmrouteError:
    return WarmrouteError(
        f"{path} has {count} lower-case words that are one token everywhere, and {_TOO_FEW} are needed to "
        "write answers; use another --model-dir"
    )


def _eos_id(model_dir: Path) -> int | None:
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((model_dir / name).read_bytes()).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError) as error:
            raise WarmrouteError(f"cannot read {model_dir / name}: {error}") from error
        if isinstance(value, list):
            value = value[0] if value else None
        if value is not None:
            return int(value)
    return None
