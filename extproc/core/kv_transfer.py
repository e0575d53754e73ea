"""What events have said of one engine, as plain values: for another router, or for later.

A part names runs of blocks, each after the run it hangs below, with the engine's handles and our hashes.
Parts are taken in order, into an index where nothing is known of the engine; events can then go on from where
they stood. Orphans are left out: events tell of them again, or nobody misses them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from extproc.core.kv_residence import EngineBlocks
from extproc.core.kv_runs import Handle


class EnginePart(NamedTuple):
    """Some of the blocks of one engine.

    Attributes:
        block_size: tokens; None: no event has told.
        group: of layers, the one that counts; None: not known yet.
        runs: for each run the handle of the block it hangs below (None: it starts a prompt, or what it hung
            below is gone), and the number of its blocks.
        handles: of all runs, one after the other.
        blocks: our hash of each.
        copies: at which places there is something else than one copy on the GPU: (place, packed count).
    """

    block_size: int | None
    group: int | None
    runs: tuple[tuple[Handle | None, int], ...]
    handles: tuple[Handle, ...]
    blocks: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


def export(engine: EngineBlocks, part_blocks: int) -> list[EnginePart]:
    """All blocks of an engine as they are now, in parts of at most so many."""
    parts: list[EnginePart] = []
    runs: list[tuple[Handle | None, int]] = []
    handles: list[Handle] = []

    def end_part() -> None:
        blocks, copies = engine.blocks_at(handles), engine.copies_at(handles)
        parts.append(EnginePart(engine.block_size, engine.group, tuple(runs), tuple(handles), blocks, copies))
        runs.clear()
        handles.clear()

    for above, stretch in _stretches(engine):
        parent, rest = above, stretch
        while rest:
            taken = rest[: part_blocks - len(handles)]
            runs.append((parent, len(taken)))
            handles += taken
            parent, rest = taken[-1], rest[len(taken) :]
            if len(handles) == part_blocks:
                end_part()
    if handles or not parts:
        end_part()
    return parts


def restore(engine: EngineBlocks, part: EnginePart) -> None:
    """Take what another has known of an engine.

    Raises:
        ValueError: the part contradicts itself, or what is known already.
    """
    lengths = [count for _, count in part.runs]
    if not len(part.blocks) == len(part.handles) == sum(lengths):
        raise ValueError("a part of an index has not as many handles as blocks: it is damaged")
    if min(lengths, default=1) < 1:
        raise ValueError("a part of an index has an empty run: it is damaged")
    if len(set(part.handles)) != len(part.handles) or any(map(engine.holds, part.handles)):
        raise ValueError("a part of an index has a handle twice: it is damaged, or was taken before")
    copies = dict(part.copies)
    if copies and not all(0 <= at < len(part.handles) and count > 0 for at, count in copies.items()):
        raise ValueError("a part of an index counts copies of no block: it is damaged")
    engine.block_size, engine.group = part.block_size, part.group
    start = 0
    for parent, count in part.runs:
        stop = start + count
        counts = [copies.get(at, 1) for at in range(start, stop)] if copies else None
        engine.bind_known(parent, part.handles[start:stop], part.blocks[start:stop], counts)
        start = stop


def _stretches(engine: EngineBlocks) -> Iterator[tuple[Handle | None, list[Handle]]]:
    """Runs without their holes: what is behind one hangs below nothing that is known."""
    gone = engine.runs.gone
    for run in engine.runs:
        if not gone or gone.keys().isdisjoint(run.handles):
            yield run.parent, run.handles
            continue
        parent, stretch = run.parent, list[Handle]()
        for handle in run.handles:
            if handle not in gone:
                stretch.append(handle)
                continue
            if stretch:
                yield parent, stretch
            parent, stretch = handle, []
        if stretch:
            yield parent, stretch
