"""What goes into the engine model and what comes out of it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from extproc.core.errors import WarmrouteError
from extproc.core.hashing import chain
from extproc.core.namespace import Namespace
from extproc.core.types import KvEvent
from extproc.sim.time_model import TimeModel

FinishReason = Literal["length", "stop"]


class RequestTooLongError(WarmrouteError):
    """Prompt and output together exceed what the engine accepts; it was not queued."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine core. The names are vLLM's options.

    `num_gpu_blocks` counts the placeholder block that the engine keeps back. `seed` goes into the block
    hashes: engines with different seeds name equal blocks differently, as real ones may.

    Raises:
        ValueError: a limit is below 1, or one sequence of `max_model_len` tokens does not fit the pool.
    """

    block_size: int = 16
    num_gpu_blocks: int = 4096
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 8192
    max_model_len: int = 16384
    time: TimeModel = field(default_factory=TimeModel)
    seed: int = 0
    emit_events: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        capacity = (self.num_gpu_blocks - 1) * self.block_size
        if self.max_model_len > capacity:
            raise ValueError(
                f"{self.num_gpu_blocks} blocks of {self.block_size} tokens hold {max(capacity, 0)} tokens, "
                f"but max_model_len is {self.max_model_len}; raise num_gpu_blocks or lower max_model_len"
            )

    def chain_seed(self, adapter: str | None, cache_salt: str | None) -> int:
        """First link of the hash chain of requests with this adapter and salt."""
        return Namespace(f"engine-{self.seed}", "", adapter, cache_salt).seed


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One sequence, with what it is going to generate already decided.

    `block_hashes` chain every full block of prompt and output together. `token_ids` (prompt, then output)
    only serve the events; a caller that has no tokens, but knows where prefixes agree, leaves them out.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[int]
    token_ids: "array[int] | None" = None
    adapter: str | None = None
    cache_salt: str | None = None
    finish_reason: FinishReason = "length"

    @classmethod
    def from_tokens(
        cls,
        request_id: str,
        prompt: "array[int]",
        output: "array[int]",
        config: EngineConfig,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        finish_reason: FinishReason = "length",
    ) -> "EngineRequest":
        """A request for `config`'s engine whose blocks are hashed from its tokens."""
        tokens = prompt + output
        return cls(
            request_id=request_id,
            prompt_tokens=len(prompt),
            output_tokens=len(output),
            block_hashes=chain(tokens, config.block_size, config.chain_seed(adapter, cache_salt)),
            token_ids=tokens,
            adapter=adapter,
            cache_salt=cache_salt,
            finish_reason=finish_reason,
        )


class FirstToken(NamedTuple):
    """A request's prefill is done. Times in seconds."""

    request: EngineRequest
    cached_tokens: int  # of its prompt, found in the prefix cache when it was first scheduled
    queue_s: float
    ttft_s: float


class Finished(NamedTuple):
    """A request has produced its last token. Times in seconds since it was submitted."""

    request: EngineRequest
    cached_tokens: int
    ttft_s: float
    e2e_s: float
    preemptions: int


class Outlook(NamedTuple):
    """What a sequence still has before it when the step in flight has ended, in tokens."""

    request: EngineRequest
    computed: int  # in its KV blocks
    uncomputed: int  # known and not computed; a decoding sequence has 1
    remaining: int  # to be generated, the truth
    admitted: bool  # False: it has not been looked up in the prefix cache yet


class Gauges(NamedTuple):
    """What the engine's metrics say of its sequences and of its memory."""

    running: int
    waiting: int
    kv_usage: float  # share of the usable blocks, 0..1


@dataclass(slots=True)
class StepResult:
    """What one engine step brought, at the moment it ended.

    `events` is the one KV event batch of the step, to be published before its tokens. Every request in
    `emitted` got exactly one more token.
    """

    at: float
    events: tuple[KvEvent, ...]
    emitted: list[EngineRequest]
    first_tokens: list[FirstToken]
    finished: list[Finished]
