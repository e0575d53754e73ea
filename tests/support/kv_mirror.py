"""A slow, plain model of what workers hold, to compare the index with.

Blocks are identified by interning (parent, tokens, extra keys): no hashes, so nothing can collide.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier, WorkerId

Root = tuple[str, str, str | None, str | None]  # model, tokenizer, adapter, salt


class Blocks:
    """Names for blocks."""

    def __init__(self) -> None:
        self.names: dict[tuple[object, ...], int] = {}

    def name(self, parent: object, tokens: tuple[int, ...], extra: object = None) -> int:
        return self.names.setdefault((parent, tokens, extra), len(self.names))

    def prompt(self, root: Root, tokens: list[int], size: int) -> list[int]:
        out: list[int] = []
        parent: object = root
        for at in range(len(tokens) // size):
            parent = self.name(parent, tuple(tokens[at * size : (at + 1) * size]))
            out.append(parent)
        return out


@dataclass
class MirrorWorker:
    blocks: Blocks
    revisions: tuple[str, str]
    bound: dict[int | bytes, int] = field(default_factory=dict)
    copies: Counter[tuple[int | bytes, Tier]] = field(default_factory=Counter)
    pending: dict[int | bytes, list[BlockStored | BlockRemoved]] = field(default_factory=dict)
    reserved: Counter[int] = field(default_factory=Counter)

    def clear(self) -> None:
        self.bound.clear()
        self.copies.clear()
        self.pending.clear()

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif isinstance(event, BlockRemoved):
            for handle in event.block_hashes:
                self.remove(handle, event.tier)
        elif not event.token_ids or all(handle in self.bound for handle in event.block_hashes):
            self.again(event)
        elif event.parent is None or event.parent in self.bound:
            self.attach(event, None if event.parent is None else self.bound[event.parent])
        elif event.block_hashes[0] in self.bound:
            known = 0
            while event.block_hashes[known] in self.bound:
                known += 1
            self.again(replace(event, block_hashes=event.block_hashes[:known]))
            self.attach(cut(event, known), self.bound[event.block_hashes[known - 1]])
        else:
            self.pending.setdefault(event.parent, []).append(event)

    def again(self, event: BlockStored) -> None:
        for handle in event.block_hashes:
            if handle in self.bound:
                self.copies[handle, event.tier] += 1

    def remove(self, handle: int | bytes, tier: Tier) -> None:
        if self.copies[handle, tier]:
            self.copies[handle, tier] -= 1
            if not any(self.copies[handle, t] for t in Tier):
                del self.bound[handle]
            return
        for parent, log in self.pending.items():
            left = live(log)
            if left[handle, tier]:
                log.append(BlockRemoved((handle,), tier))
                if left.total() == 1:
                    del self.pending[parent]
                return

    def attach(self, event: BlockStored, parent: int | None) -> None:
        queue: list[tuple[BlockStored, int | None]] = [(event, parent)]
        late: list[BlockRemoved] = []
        while queue:
            event, at = queue.pop(0)
            for handle, name in zip(event.block_hashes, self.names(event, at), strict=True):
                self.bound.setdefault(handle, name)
                self.copies[handle, event.tier] += 1
            for handle, name in zip(event.block_hashes, self.names(event, at), strict=True):
                for waiting in self.pending.pop(handle, []):
                    if isinstance(waiting, BlockStored):
                        queue.append((waiting, name))
                    else:
                        late.append(waiting)
        for removal in late:
            self.remove(removal.block_hashes[0], removal.tier)

    def names(self, event: BlockStored, parent: int | None) -> list[int]:
        out: list[int] = []
        size = event.block_size
        for at in range(len(event.block_hashes)):
            keys = list((event.extra_keys or ())[at] or ()) if event.extra_keys else []
            if event.lora_name in keys:
                keys.remove(event.lora_name)
            above: object = out[-1] if out else parent
            if above is None:
                salts = [key for key in keys if isinstance(key, str)]
                if salts:
                    keys.remove(salts[-1])
                above = (*self.revisions, event.lora_name, salts[-1] if salts else None)
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            out.append(self.blocks.name(above, tokens, repr(keys) if keys else None))
        return out

    def tiers(self) -> dict[int, set[Tier]]:
        out: dict[int, set[Tier]] = defaultdict(set)
        for (handle, tier), count in self.copies.items():
            if count:
                out[self.bound[handle]].add(tier)
        return out

    def match(self, names: list[int]) -> tuple[int, int, int]:
        """blocks, reserved_only, offloaded."""
        tiers = self.tiers()
        blocks = reserved_only = 0
        for name in names:
            confirmed = Tier.GPU in tiers.get(name, ())
            if not confirmed and not self.reserved[name]:
                break
            blocks += 1
            reserved_only += not confirmed
        total = blocks
        while total < len(names) and (tiers.get(names[total]) or self.reserved[names[total]]):
            total += 1
        return blocks, reserved_only, total - blocks


class Mirror:
    """All workers."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.workers: dict[WorkerId, MirrorWorker] = {}

    def add(self, worker: WorkerId, *revisions: str) -> None:
        self.workers[worker] = MirrorWorker(self.blocks, (revisions[0], revisions[1]))

    def match(self, names: list[int]) -> dict[WorkerId, tuple[int, int, int]]:
        found = {worker: state.match(names) for worker, state in self.workers.items()}
        return {worker: match for worker, match in found.items() if match[0] + match[2]}


def live(log: list[BlockStored | BlockRemoved]) -> Counter[tuple[int | bytes, Tier]]:
    """Copies in a log of stores and removals."""
    out: Counter[tuple[int | bytes, Tier]] = Counter()
    for event in log:
        for handle in event.block_hashes:
            out[handle, event.tier] += 1 if isinstance(event, BlockStored) else -1
    return out


def cut(event: BlockStored, first: int) -> BlockStored:
    """`event` without its first blocks."""
    return replace(
        event,
        block_hashes=event.block_hashes[first:],
        parent=event.block_hashes[first - 1],
        token_ids=list(event.token_ids)[first * event.block_size :],
        extra_keys=None if event.extra_keys is None else event.extra_keys[first:],
    )
