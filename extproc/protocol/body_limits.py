"""How much of a request body is read. What exceeds it goes on unread, and is routed by load.

A body costs before anyone is asked who sent it, so the bounds hold before it is decoded: a few bytes can
decompress to a thousand times as many, and two bytes of JSON (`[]`) make an object of 56.
"""

import zlib
from dataclasses import dataclass

_GZIP_MEMBERS = 16  # each one copies what is left of the body: a bomb of another kind
_RATIO = 100  # what people and programs write is compressed to a tenth, hardly ever to a fiftieth
_RATIO_FREE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds on one body.

    Attributes:
        read_bytes: a longer one is not decoded; of a compressed one, its decompressed length.
        json_values: one with more values (numbers, texts, lists, objects) is not decoded.
        messages: a conversation with more is not rendered.
        prompts: of a completion with more, none is encoded.
    """

    read_bytes: int = 16 << 20
    json_values: int = 1 << 18
    messages: int = 10_000
    prompts: int = 2_048


DEFAULT_LIMITS = BodyLimits()


def has_more_values(body: bytes, most: int) -> bool:
    """Whether a JSON document has more than `most` values. Wrong by a factor of two at most, on purpose.

    Each value but the first follows a `[`, a `{`, a `,` or a `:`, and there are as many `:` as keys. So it is
    enough to count marks, at the speed of memory; where texts hold many, they are cut out first. With its
    mark, or what closes it, a value takes two bytes at least: most bodies are too short to have so many.
    """
    if len(body) < 2 * most or _marks(body) <= most:
        return False
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # no quote is left inside a text
    if plain.count(b'"') > 4 * most:
        return True
    return _marks(b"".join(plain.split(b'"')[::2])) > most


def _marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def gunzip(data: bytes, most: int) -> bytes | None:
    """The decompressed bytes; None when the data is broken, or more than `most` bytes, or a bomb.

    A bomb is what grows to more than a hundred times its size, beyond the first MiB.
    """
    out: list[bytes] = []
    room = min(most, max(_RATIO_FREE_BYTES, _RATIO * len(data)))
    for _ in range(_GZIP_MEMBERS):
        decoder = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        try:
            piece = decoder.decompress(data, room + 1)
        except zlib.error:
            return None
        room -= len(piece)
        if room < 0 or not decoder.eof:
            return None
        out.append(piece)
        data = decoder.unused_data  # gzip members may follow one another
        if not data:
            return b"".join(out)
    return None
