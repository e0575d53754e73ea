"""KV events in portions of bounded size, so that no message takes long to apply at a stretch."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

KvEvents = tuple[KvEvent, ...]


def portions(events: Iterable[KvEvent], blocks: int) -> Iterator[KvEvents]:
    """The same events in the same order, at most so many blocks at a time; at least one portion.

    An event with more blocks is several: those stored behind the first portion hang below its last block.
    """
    portion: list[KvEvent] = []
    room = blocks
    for event in events:
        for part in _parts(event, blocks):
            size = 0 if isinstance(part, AllBlocksCleared) else len(part.block_hashes)
            if size > room:
                yield tuple(portion)
                portion, room = [], blocks
            portion.append(part)
            room -= size
    yield tuple(portion)


def _parts(event: KvEvent, blocks: int) -> Iterator[KvEvent]:
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= blocks:
        yield event
        return
    count = len(event.block_hashes)
    if isinstance(event, BlockRemoved):
        for start in range(0, count, blocks):
            yield replace(event, block_hashes=event.block_hashes[start : start + blocks])
        return
    keys = event.extra_keys
    fits = len(event.token_ids) in {0, count * event.block_size} and (keys is None or len(keys) == count)
    if not fits:  # nothing can be made of it, and that is found out at once
        yield event
        return
    yield from _stored(event, blocks)


def _stored(event: BlockStored, blocks: int) -> Iterator[BlockStored]:
    parent, size, keys = event.parent, event.block_size, event.extra_keys
    for start in range(0, len(event.block_hashes), blocks):
        stop = start + blocks
        part = replace(
            event,
            block_hashes=event.block_hashes[start:stop],
            parent=parent,
            token_ids=event.token_ids[start * size : stop * size],
            extra_keys=None if keys is None else keys[start:stop],
        )
        yield part
        parent = part.block_hashes[-1]
