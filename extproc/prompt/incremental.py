"""Encodes only what is new: texts in pieces whose ids are remembered, with the ids of the whole.

A conversation comes again with every turn, longer by a little. It is cut where that surely changes nothing
(`safe_cuts`), each piece is looked up by its content, and those never seen are encoded, together. That it
changes nothing is tried at load as well, on texts that tell tokenizers apart and on random mixtures of them.
"""

from array import array
from collections.abc import Sequence
from random import Random
from typing import Protocol

from extproc.prompt.piece_cache import PieceCache, PieceCacheStats
from extproc.prompt.safe_cuts import SafeCuts

_TRIED = ((1, 2), (1, 24), (16, 64))  # shortest and longest pieces of the trial
_MIXTURES, _PARTS = 60, 24


class PieceEncoder(Protocol):
    """What encodes the pieces. `piece`: their shortest and longest length, in characters."""

    name: str
    note: str | None
    piece: tuple[int, int]

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Token ids of a text. Raises `Unsupported` for text that is not valid Unicode."""
        ...

    def encode_pieces(self, pieces: Sequence[str]) -> list[bytes]:
        """Token ids of each text, without special tokens, as bytes of 4-byte integers. Raises as `encode`."""
        ...


class IncrementalEncoder:
    """An encoder that remembers. `reuse` says where it cuts, for people."""

    def __init__(self, encoder: PieceEncoder, cuts: SafeCuts, limit: int) -> None:
        self._encoder = encoder
        self._cuts = cuts
        self._cache = PieceCache(limit)
        self._shortest, self._longest = encoder.piece
        self._before, self._after = _wrapping(encoder)
        self.name = encoder.name
        self.note = encoder.note
        self.reuse = reuse(cuts)

    @property
    def stats(self) -> PieceCacheStats:
        """What was known and what was not; changes while others encode."""
        return self._cache.stats

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """See `Encoder`."""
        if len(text) <= self._longest:
            self._cache.count(known=0, new=len(text))
            return self._encoder.encode(text, add_special_tokens=add_special_tokens)
        found = self._ids(self._cuts.pieces(text, self._shortest, self._longest))
        out = array("I")
        out.frombytes(b"".join((self._before, *found, self._after) if add_special_tokens else found))
        return out

    def _ids(self, pieces: Sequence[str]) -> list[bytes]:
        found = self._cache.find(pieces)
        missing = [at for at, ids in enumerate(found) if ids is None]
        new = [pieces[at] for at in missing]
        fresh = self._encoder.encode_pieces(new) if new else []
        for at, ids in zip(missing, fresh, strict=True):
            found[at] = ids
        # The last piece is another in the next turn, so it is kept only where it is long for want of a cut.
        if missing and missing[-1] == len(pieces) - 1 and len(pieces[-1]) <= self._longest:
            self._cache.keep(new[:-1], fresh[:-1])
        else:
            self._cache.keep(new, fresh)
        fresh_characters = sum(map(len, new))
        self._cache.count(known=sum(map(len, pieces)) - fresh_characters, new=fresh_characters)
        return [ids for ids in found if ids is not None]


def proven(encoder: PieceEncoder, cuts: SafeCuts, texts: Sequence[str]) -> SafeCuts | None:
    """As many of the cuts as give the encoder's own ids on these texts and on mixtures; None: none do."""
    tried = [*texts, *_mixtures(texts)]
    for one in (cuts, SafeCuts(cuts.token, None, "ids differed when tried")):
        if (one.token or one.between) and _agrees(encoder, one, tried):
            return one
    return None


def reuse(cuts: SafeCuts | None) -> str:
    """Where texts are cut, in words."""
    if cuts is None:
        return "off"
    if cuts.between is None:
        return f"between special tokens only: {cuts.note}"
    return "between words" if cuts.token is None else "between special tokens and between words"


def _agrees(encoder: PieceEncoder, cuts: SafeCuts, texts: Sequence[str]) -> bool:
    before, after = _wrapping(encoder)
    for number, text in enumerate(texts):
        whole = encoder.encode(text, add_special_tokens=False).tobytes()
        shortest, longest = _TRIED[number % len(_TRIED)]
        if b"".join(encoder.encode_pieces(cuts.pieces(text, shortest, longest))) != whole:
            return False
        if encoder.encode(text, add_special_tokens=True).tobytes() != before + whole + after:
            return False
    return True


def _wrapping(encoder: PieceEncoder) -> tuple[bytes, bytes]:
    """Ids of the special tokens before and after a text's own. `proven` finds out if there is more to it."""
    own = encoder.encode("a b", add_special_tokens=False)
    full = encoder.encode("a b", add_special_tokens=True)
    for begin in range(len(full) - len(own) + 1):
        if full[begin : begin + len(own)] == own:
            return full[:begin].tobytes(), full[begin + len(own) :].tobytes()
    return b"", b""


def _mixtures(texts: Sequence[str]) -> list[str]:
    """Random cuttings of the texts, put together at random; the same each time."""
    random = Random(1)  # noqa: S311  # not a secret
    source = [text for text in texts if text]

    def part() -> str:
        text = random.choice(source)
        begin = random.randrange(len(text))
        return text[begin : begin + random.choice((1, 2, 5, 40))]

    return ["".join(part() for _ in range(_PARTS)) for _ in range(_MIXTURES)] if source else []
