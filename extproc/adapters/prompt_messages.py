"""What a router and the processes that encode for it tell each other.

One after the other, over a pair of sockets: `Load`, answered by `Loaded` or `Refused`; and `Job` followed by
the body, answered by `Done` followed by the token ids and the hashes of each prompt, or by `NotHere` or
`Broken`. Objects are pickled: both ends are this program, and one has started the other.
"""

from dataclasses import dataclass
from typing import NamedTuple

from extproc.core.hashing import ChainKey
from extproc.prompt.recipe import EncoderRecipe, Identity
from extproc.protocol.openai import RequestKind


@dataclass(frozen=True, slots=True)
class Load:
    """Make an encoder, and call it `encoder` from now on."""

    encoder: int
    recipe: EncoderRecipe


@dataclass(frozen=True, slots=True)
class Loaded:
    """It is there."""

    encoder: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class Refused:
    """It cannot be made."""

    encoder: int
    why: str


@dataclass(frozen=True, slots=True)
class Job:
    """Encode the body that follows, and hash its prompts where `chain` is given.

    `number` comes back with the answer: one that belongs to another job must not be taken for this one's.
    """

    number: int
    encoder: int
    kind: RequestKind
    chain: ChainKey | None


class Encoded(NamedTuple):
    """What one encoder has counted since its process began; see `PieceCacheStats`."""

    known: int = 0
    new: int = 0
    pieces: int = 0
    size: int = 0
    evicted: int = 0


class Hashed(NamedTuple):
    """What a process has counted of hashing; see `ChainMemo`.

    Attributes:
        known: stretches of blocks that were known.
        new: stretches that were hashed.
        blocks: that are remembered now.
    """

    known: int = 0
    new: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """`prompts` arrays of ids follow, of 4 bytes each, and as many of hashes, of 8, if they were asked for.

    Attributes:
        number: of the job.
        prompts: how many.
        encoded_s: seconds since the text was rendered; None: nothing is rendered for such a request.
        encoded: so far by this encoder.
        hashed: so far by this process.
    """

    number: int
    prompts: int
    encoded_s: float | None
    encoded: Encoded
    hashed: Hashed


@dataclass(frozen=True, slots=True)
class NotHere:
    """`extproc.prompt.errors.Unsupported`."""

    number: int
    reason: str
    detail: str | None


@dataclass(frozen=True, slots=True)
class Broken:
    """An error that nobody has foreseen. Its text is not told: it may hold parts of the prompt."""

    number: int
    error: str
