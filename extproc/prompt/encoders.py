"""Text to token ids. `tokenizers` is the reference; `fastokens` takes over where it proves identical.

The proof is a self-check at load: both encode a fixed corpus, and every id must agree. Where `fastokens` is
not installed, cannot read the tokenizer or disagrees anywhere, the reference does the work and `note` says
why. Both release the interpreter lock while they encode. Either encodes only what is new, where pieces of a
text prove to have the ids of the whole (`incremental`).
"""

import importlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from tokenizers import Tokenizer

from extproc.prompt.errors import Unsupported
from extproc.prompt.incremental import IncrementalEncoder, proven, reuse
from extproc.prompt.piece_cache import PieceCacheStats
from extproc.prompt.safe_cuts import safe_cuts

DEFAULT_CACHE_BYTES = 128 << 20
"""Memory for texts that were encoded before, and their ids."""
_LONG = 20_000  # the corpus has longer texts only to compare libraries


class _Encodes(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]": ...


class Encoder(Protocol):
    """Encodes one text.

    `name` is the library's; `note` says why it is not the fast one, if it is not. `reuse` says where texts
    are cut so that what was encoded before is not encoded again; `stats` how often that helped.
    """

    name: str
    note: str | None
    reuse: str

    @property
    def stats(self) -> PieceCacheStats:
        """Counters of what was known; all zero without reuse."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Token ids. Raises `Unsupported` for text that is not valid Unicode."""
        ...


class ReferenceEncoder:
    """The engine's own library."""

    name = "tokenizers"
    piece = (512, 2048)  # encodes some 500 characters in the time that a look-up takes
    reuse = reuse(None)

    def __init__(self, tokenizer: Tokenizer, note: str | None = None) -> None:
        self._tokenizer = tokenizer
        self.note = note
        self.stats = PieceCacheStats()

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """See `Encoder`."""
        try:
            # The batch call releases the interpreter lock; the single one does not.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise Unsupported("text", "lone surrogates") from None
        return array("I", encoding.ids)

    def encode_pieces(self, pieces: Sequence[str]) -> list[bytes]:
        """See `PieceEncoder`."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise Unsupported("text", "lone surrogates") from None
        return [array("I", encoding.ids).tobytes() for encoding in encodings]


class FastEncoder:
    """`fastokens`, with the reference behind it for texts on which it gives up."""

    name = "fastokens"
    note: str | None = None
    piece = (6144, 12_288)
    reuse = reuse(None)

    def __init__(self, tokenizer: Tokenizer) -> None:
        fastokens = importlib.import_module("fastokens")  # an optional extra, without type information
        self._reference = ReferenceEncoder(tokenizer)
        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        self.stats = PieceCacheStats()

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """See `Encoder`."""
        try:
            data, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        except Exception:
            return self._reference.encode(text, add_special_tokens=add_special_tokens)
        ids = array("I")
        ids.frombytes(data)
        return ids

    def encode_pieces(self, pieces: Sequence[str]) -> list[bytes]:
        """See `PieceEncoder`."""
        try:
            data, offsets = self._tokenizer.encode_batch_flat(list(pieces), add_special_tokens=False)
        except Exception:
            return self._reference.encode_pieces(pieces)
        ends = array("Q")
        ends.frombytes(offsets)
        return [data[4 * begin : 4 * end] for begin, end in pairwise(ends)]


def choose_encoder(tokenizer: Tokenizer, *, fast: bool, cache_bytes: int = DEFAULT_CACHE_BYTES) -> Encoder:
    """The fastest encoder that gives the reference's ids on the whole corpus.

    `cache_bytes`: memory for what was encoded before; 0 keeps nothing.
    """
    chosen = _choose_library(tokenizer, fast=fast)
    if not cache_bytes or tokenizer.encode_special_tokens:
        return chosen
    texts = [text for text in corpus(tokenizer) if len(text) < _LONG]
    cuts = proven(chosen, safe_cuts(tokenizer), texts)
    return chosen if cuts is None else IncrementalEncoder(chosen, cuts, cache_bytes)


def _choose_library(tokenizer: Tokenizer, *, fast: bool) -> "ReferenceEncoder | FastEncoder":
    if not fast:
        return ReferenceEncoder(tokenizer, "fast encoding is switched off")
    if tokenizer.encode_special_tokens:
        return ReferenceEncoder(tokenizer, "special tokens are split, which only tokenizers does")
    try:
        candidate = FastEncoder(tokenizer)
    except ImportError:
        return ReferenceEncoder(tokenizer, "fastokens is not installed (pip install 'warmroute[fast]')")
    except Exception as error:
        return ReferenceEncoder(tokenizer, f"fastokens cannot read this tokenizer: {str(error)[:200]}")
    reference = ReferenceEncoder(tokenizer)
    difference = first_difference(reference, candidate, corpus(tokenizer))
    if difference is not None:
        return ReferenceEncoder(tokenizer, f"fastokens gives other ids for {difference[:40]!r}")
    return candidate


def first_difference(one: _Encodes, other: _Encodes, texts: list[str]) -> str | None:
    """The first text that two encoders disagree on, with or without special tokens."""
    for text in texts:
        for special in (False, True):
            expected = one.encode(text, add_special_tokens=special)
            if other.encode(text, add_special_tokens=special) != expected:
                return text
    return None


def corpus(tokenizer: Tokenizer) -> list[str]:
    """Texts that tell tokenizers apart: scripts, white space, code, numbers, special tokens, length."""
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:64]
    words = "The quick brown fox can't jump over 1,234,567 lazy dogs; it's 3.14e-10 o'clock, isn't it?"
    scripts = [
        "Zürich déjà vu naïve Straße ſ ß İstanbul ǅ ﬁ",  # noqa: RUF001  # case folding has odd letters
        "東京都の天気は晴れです。今日は2024年1月1日。",
        "नमस्ते दुनिया मैं ठीक हूँ",
        "안녕하세요 세계 각",
        "مرحبا بالعالم ١٢٣",
        "שלום עולם",
        "Привет, мир! ЁЖИК",
        "สวัสดีชาวโลก",
        "e\u0301 a\u030a n\u0303 \u1100\u1161\u11a8 \u212b \u2126 ﷺ ½ ² ①",
        "🤖👩‍👩‍👧‍👦🇨🇭🏳️‍🌈 ❤️ ☀️ 👍🏽",  # the joiners are the point
        "\ufeff zero\u200bwidth \u202ertl\u202c \u00a0nbsp\u3000ideographic\u2028line\x85next",
        "\x00\x01\x1b[31m\x7f\ufffd\U0010ffff \ue000",
    ]
    spaces = [
        "",
        " ",
        "  ",
        "\n",
        "\r\n\r\n",
        "\t\t x \n\n  y\r z   ",
        " leading and trailing ",
        "a" + " " * 200 + "b" + "\n" * 100 + "\t" * 50,
    ]
    code = [
        "def f(x: int) -> str:\n    return f'{x**2!r}'  # ünï\n\n\nclass A:\n\tpass\n",
        '{"a": [1, 2.50, {"b": null}], "c": "</think>\\n", "d": true}',
        "SELECT * FROM t WHERE a<>'b' AND c>=1e9; -- x\n/* y */ #!/bin/sh\n$PATH && ||",
        "https://example.org/a_b-c?d=e%20f&g=1#h <b>&amp;</b> user@host.tld C:\\dir\\file.txt",
        "1234567890 007 0xDEADBEEF 1_000 ١٢٣ Ⅷ 12:34:56 2024-01-01T00:00:00Z +1-800",
        "I'M WE'LL they'Re don'T 'S 's’s l'été",  # noqa: RUF001  # a typographic apostrophe
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "!?!?!?...---===***___~~~```$$$%%%^^^@@@",
    ]
    with_special = [f"x{token}y {token} \n{token}{token}" for token in special]
    with_special += ["".join(special), " ".join(special), *[token[:-1] for token in special[:8]]]
    everything = "\n".join([words, *scripts, *code, *special])
    return [words, *scripts, *spaces, *code, *with_special, everything, everything * 20]
