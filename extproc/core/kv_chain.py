"""From an engine's own description of stored blocks to our chained hashes.

An engine mixes more than tokens into its hashes (`extra_keys`), and publishes that untagged, in this order:
adapter name (every block), `(identifier, offset)` of each multimodal input (blocks it touches), cache salt
(first block of a prompt only), digests of prompt embeddings. Requests know adapter and salt, so these two
go into the namespace; all the rest is mixed into the chain from its block on, so that a text-only request
never matches a block behind an image.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from extproc.core.hashing import chain, mix, token_array
from extproc.core.namespace import Namespace, brief_salt
from extproc.core.types import BlockStored

_Keys = Sequence[object]

EventHashes: TypeAlias = Callable[[BlockStored, int | None, str, str], list[int] | None]
"""What `event_chain` does. Another may stand for it where hashes are known and token ids are not."""


def event_chain(
    event: BlockStored, parent: int | None, model_revision: str, tokenizer_revision: str
) -> list[int] | None:
    """Our hash of each block of `event`, in order.

    Args:
        event: as the engine published it.
        parent: our hash of the block before the first one; None at the start of a prompt.
        model_revision: of the engine.
        tokenizer_revision: of the engine.

    Returns:
        One hash per block, or None when tokens and blocks of the event cannot be matched up: it carries no
        tokens, leaves blocks out (sliding windows), or has an impossible token id. A
        `chained` event is believed as it is.
    """
    size = event.block_size
    count = len(event.block_hashes)
    if event.chained:
        ours = [block for block in event.block_hashes if isinstance(block, int)]
        return ours if len(ours) == count else None
    if size <= 0 or len(event.token_ids) != count * size:
        return None
    extra = event.extra_keys
    if extra is not None and len(extra) != count:
        return None
    try:
        tokens = token_array(event.token_ids)
    except (OverflowError, TypeError):
        return None
    adapter = event.lora_name
    if extra is None or not any(extra):
        seed = Namespace(model_revision, tokenizer_revision, adapter).seed if parent is None else parent
        return chain(tokens, size, seed)

    salt: str | None = None
    mixed = [_without_adapter(keys, adapter) for keys in extra]
    if parent is None:
        salt, mixed[0] = _split_salt(mixed[0])
        seed = Namespace(model_revision, tokenizer_revision, adapter, salt).seed
    else:
        seed = parent
    hashes: list[int] = []
    for start, stop in _runs(mixed):
        if mixed[start]:
            seed = mix(seed, b"".join(_spell(mixed[start])))
        hashes += chain(tokens[start * size : stop * size], size, seed)
        seed = hashes[-1]
    return hashes


def _without_adapter(keys: _Keys | None, adapter: str | None) -> _Keys:
    if not keys:
        return ()
    if adapter is None or adapter not in keys:
        return keys
    rest = list(keys)
    rest.remove(adapter)  # the first occurrence: a salt that spells like the adapter comes after it
    return rest


def _split_salt(keys: _Keys) -> tuple[str | None, _Keys]:
    """The salt and the other keys of a prompt's first block: the salt is the last bare string."""
    for at in range(len(keys) - 1, -1, -1):
        value = keys[at]
        if isinstance(value, str):
            return brief_salt(value), [*keys[:at], *keys[at + 1 :]]
    return None, keys


def _runs(mixed: Sequence[_Keys]) -> Iterator[tuple[int, int]]:
    """Spans of blocks that can be chained in one go: at most the first block of each has extra keys."""
    start = 0
    for at in range(1, len(mixed)):
        if mixed[at]:
            yield start, at
            start = at
    yield start, len(mixed)


def _spell(keys: Iterable[object]) -> Iterator[bytes]:
    """Bytes that differ whenever the keys differ: every part carries its kind and its length."""
    for key in keys:
        if isinstance(key, (list, tuple)):
            inner = b"".join(_spell(key))
            yield b"(%d:%b" % (len(inner), inner)
        else:
            data = key if isinstance(key, bytes) else str(key).encode("utf-8", "surrogatepass")
            yield b"%b%d:%b" % (type(key).__name__.encode(), len(data), data)
