import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extproc.core.hashing import chain
from extproc.core.kv_index import IndexStats, KvIndex, Match
from extproc.core.namespace import Namespace
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, Tier, WorkerId
from extproc.protocol.kv_events import decode
from tests.support import core
from tests.support.kv_captures import RECORDINGS, payloads
from tests.support.kv_mirror import Mirror

REVISIONS = ("model", "tokenizer")
W = [WorkerId(f"10.0.0.{at}:8000") for at in range(4)]


def stored(handles, tokens, parent=None, size=2, **fields) -> BlockStored:
    return BlockStored(tuple(handles), parent, tokens, size, **fields)


def prompt(tokens, size=2, **namespace) -> list[int]:
    return chain(tokens, size, Namespace(*REVISIONS, **namespace).seed)


def index(*workers: WorkerId, **options) -> KvIndex:
    out = KvIndex(**options)
    for worker in workers:
        out.add_worker(worker, *REVISIONS)
    return out


def found(idx: KvIndex, chain: list[int]) -> list[Match]:
    """What is matched, without what was sent there: that is known otherwise."""
    return [match._replace(sent=0) for match in idx.match(chain)]


T = list(range(8))  # four blocks of two tokens
P = prompt(T)


def test_longest_prefix_for_every_worker() -> None:
    idx = index(*W)
    idx.apply(W[0], stored([1, 2, 3, 4], T))
    idx.apply(W[1], stored([11, 12], T[:4]))
    idx.apply(W[3], stored([1], [9, 9]))
    assert found(idx, P) == [Match(W[0], 4, 0, 0), Match(W[1], 2, 0, 0)]
    assert found(idx, P[:1]) == [Match(W[0], 1, 0, 0), Match(W[1], 1, 0, 0)]
    assert idx.match([]) == []
    assert found(idx, P[1:]) == [Match(W[0], 3, 0, 0), Match(W[1], 1, 0, 0)]
    assert index().match(P) == []


def test_hole_ends_the_prefix() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([1, 2, 3, 4], T))
    idx.apply(W[0], BlockRemoved((2,)))
    assert found(idx, P) == [Match(W[0], 1, 0, 0)]


def test_c41_later_block_of_another_prompt_is_no_prefix() -> None:
    a, b = [1, 2], [3, 4]
    idx = index(*W)
    idx.apply(W[1], stored([1], a))
    idx.apply(W[2], stored([2], b))
    assert found(idx, prompt(b + a)) == [Match(W[2], 1, 0, 0)]


def test_c37_salted_and_adapter_blocks_are_their_own() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([1, 2], T[:4], extra_keys=(("s",), None)))
    idx.apply(W[0], stored([3, 4], T[:4], lora_name="lA", extra_keys=(("lA",), ("lA",))))
    assert idx.match(P) == []
    assert idx.match(prompt(T, cache_salt="s"))[0].blocks == 2
    assert idx.match(prompt(T, adapter="lA"))[0].blocks == 2
    assert idx.match(prompt(T, adapter="lA", cache_salt="s")) == []


def test_d43_cleared_blocks_are_gone_and_reservations_stay() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([1, 2, 3, 4], T))
    idx.reserve(W[0], P[:2])
    idx.apply(W[0], AllBlocksCleared())
    assert found(idx, P) == [Match(W[0], 2, 2, 0)]
    idx.apply(W[0], stored([1, 2, 3, 4], T))
    idx.clear(W[0])
    assert found(idx, P) == [Match(W[0], 2, 2, 0)]
    idx.unreserve(W[0], P[:2])
    assert idx.match(P) == []
    assert idx.stats() == IndexStats()


def test_d45_orphans_wait_for_their_parent() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([4], T[6:], parent=3))
    idx.apply(W[0], stored([2, 3], T[2:6], parent=1))
    assert idx.match(P) == []
    assert idx.stats(W[0]).orphans == 3
    idx.apply(W[0], stored([1], T[:2]))
    assert found(idx, P) == [Match(W[0], 4, 0, 0)]
    assert idx.stats(W[0]).orphans == 0


def test_d45_removals_of_orphans_take_effect_when_they_are_attached() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([2, 3], T[2:6], parent=1))
    idx.apply(W[0], stored([4], T[6:], parent=3))
    idx.apply(W[0], BlockRemoved((3,)))
    idx.apply(W[0], stored([1], T[:2]))
    assert found(idx, P) == [Match(W[0], 2, 0, 0)]
    idx.apply(W[0], stored([3], T[4:6], parent=2))
    assert found(idx, P) == [Match(W[0], 4, 0, 0)]
    assert idx.stats(W[0]).unknown_removes == 0


def test_d45_orphans_about_the_same_blocks_with_different_parents() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([3], T[4:6], parent=2))
    idx.apply(W[0], stored([2, 3, 4], T[2:], parent=1))
    idx.apply(W[0], stored([1], T[:2]))
    assert found(idx, P) == [Match(W[0], 4, 0, 0)]
    assert idx.stats(W[0]).gpu_copies == 5


def test_which_group_decides_is_learned_anew_after_a_clear() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([1], T[:2], group=1, spec_kind="full_attention"))
    idx.clear(W[0])
    idx.apply(W[0], stored([1], T[:2], group=0))
    assert found(idx, P) == [Match(W[0], 1, 0, 0)]


def test_d45_too_many_orphans_lose_the_oldest() -> None:
    idx = index(W[0], max_orphans=2)
    idx.apply(W[0], stored([2], T[2:4], parent=1))
    idx.apply(W[0], stored([12, 13], T[2:6], parent=11))
    idx.apply(W[0], stored([1], T[:2]))
    assert found(idx, P) == [Match(W[0], 1, 0, 0)]
    assert (idx.stats().orphans, idx.stats().orphans_dropped) == (2, 1)


def test_leading_blocks_known_though_their_parent_is_gone() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([1, 2], T[:4]))
    idx.apply(W[0], BlockRemoved((1,)))
    idx.apply(W[0], stored([2, 3], T[2:6], parent=1))
    idx.apply(W[0], stored([1], T[:2]))
    assert found(idx, P) == [Match(W[0], 3, 0, 0)]
    idx.apply(W[0], BlockRemoved((2,)))
    assert idx.match(P)[0].blocks == 3  # stored twice, removed once


def test_copies_are_counted() -> None:
    idx = index(W[0])
    for _ in range(3):
        idx.apply(W[0], stored([1, 2], T[:4]))
    assert (idx.stats().blocks, idx.stats().gpu_copies) == (2, 6)
    idx.apply(W[0], BlockRemoved((1, 2)))
    idx.apply(W[0], BlockRemoved((1, 2)))
    assert found(idx, P) == [Match(W[0], 2, 0, 0)]
    idx.apply(W[0], BlockRemoved((1, 2, 2)))
    assert idx.match(P) == []
    assert idx.stats().unknown_removes == 1


def test_one_block_under_two_handles() -> None:
    """An adapter loaded again from another path: the engine's hashes change, ours do not."""
    idx = index(W[0])
    idx.apply(W[0], stored([1], T[:2], lora_name="lB"))
    idx.apply(W[0], stored([2], T[:2], lora_name="lB"))
    lora = prompt(T, adapter="lB")
    idx.apply(W[0], BlockRemoved((1,)))
    assert idx.match(lora)[0].blocks == 1
    idx.apply(W[0], BlockRemoved((1,)))
    assert idx.match(lora)[0].blocks == 1
    idx.apply(W[0], BlockRemoved((2,)))
    assert idx.match(lora) == []
    assert idx.stats().unknown_removes == 1


def test_offloaded_blocks_count_behind_the_gpu_prefix() -> None:
    idx = index(W[0], W[1])
    idx.apply(W[0], stored([1, 2, 3, 4], T))
    idx.apply(W[0], stored([1, 2, 3], [], size=0, tier=Tier.CPU))
    idx.apply(W[0], stored([3], [], size=0, tier=Tier.DISK))
    idx.apply(W[0], BlockRemoved((2, 3)))
    assert found(idx, P) == [Match(W[0], 1, 0, 3)]  # block 4 is on the GPU, but behind the hole
    idx.apply(W[0], BlockRemoved((3,), Tier.CPU))
    assert found(idx, P) == [Match(W[0], 1, 0, 3)]
    idx.apply(W[0], BlockRemoved((3,), Tier.DISK))
    assert found(idx, P) == [Match(W[0], 1, 0, 1)]
    idx.apply(W[0], BlockRemoved((1,)))
    assert found(idx, P) == [Match(W[0], 0, 0, 2)]
    assert idx.stats().slower_copies == 2


def test_offload_of_unknown_blocks_is_counted_and_ignored() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([7], [], size=0, tier=Tier.CPU))
    idx.apply(W[0], stored([7], [], size=16, tier=Tier.DISK))
    idx.apply(W[0], BlockRemoved((7,), Tier.CPU))
    stats = idx.stats()
    assert (stats.blocks, stats.unknown_offloads, stats.unknown_removes) == (0, 2, 1)


def test_offload_event_with_tokens_describes_itself() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([1, 2], T[:4], tier=Tier.CPU))
    assert found(idx, P) == [Match(W[0], 0, 0, 2)]
    assert idx.block_size(W[0]) is None


def test_events_that_do_not_fit_are_counted() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([1, 2], T[:3]))
    idx.apply(W[0], stored([1], []))
    idx.apply(W[0], stored([1], [-1, 2]))
    idx.apply(W[0], stored([], []))
    assert idx.match(P) == []
    assert idx.stats().malformed == 3


def test_only_full_attention_decides_in_hybrid_models() -> None:
    idx = index(W[0])
    for _ in range(2):
        idx.apply(W[0], stored([3, 4], T[4:], parent=2, group=0, spec_kind="sliding_window"))
        idx.apply(W[0], stored([1, 2, 3, 4], T, group=1, spec_kind="full_attention"))
        idx.apply(W[0], stored([1, 2, 3, 4], T, group=2, spec_kind="full_attention"))
    assert found(idx, P) == [Match(W[0], 4, 0, 0)]
    assert idx.stats().gpu_copies == 8
    idx.apply(W[0], BlockRemoved((1, 2), group=0))
    idx.apply(W[0], BlockRemoved((1, 2), group=2))
    idx.apply(W[0], BlockRemoved((4,), group=1))
    assert idx.stats().gpu_copies == 7
    assert idx.stats().ignored_groups == 6
    assert idx.stats().orphans == 0


def test_first_group_decides_for_engines_that_do_not_name_kinds() -> None:
    idx = index(W[0])
    idx.apply(W[0], stored([1], T[:2], group=0))
    idx.apply(W[0], stored([1], T[:2], group=1))
    idx.apply(W[0], BlockRemoved((1,), group=1))
    assert found(idx, P) == [Match(W[0], 1, 0, 0)]


def test_reservations_count_until_they_are_confirmed() -> None:
    idx = index(W[0], W[1])
    idx.reserve(W[0], P[:3])
    idx.reserve(W[0], P)
    assert found(idx, P) == [Match(W[0], 4, 4, 0)]
    idx.apply(W[0], stored([1, 2], T[:4]))
    assert found(idx, P) == [Match(W[0], 4, 2, 0)]
    idx.unreserve(W[0], P)
    assert found(idx, P) == [Match(W[0], 3, 1, 0)]
    idx.unreserve(W[0], P[:3])
    assert found(idx, P) == [Match(W[0], 2, 0, 0)]


def test_unbalanced_unreserve_is_an_error_and_changes_nothing() -> None:
    idx = index(W[0])
    idx.reserve(W[0], P[:2])
    with pytest.raises(ValueError, match="not reserved"):
        idx.unreserve(W[0], P[:3])
    assert found(idx, P) == [Match(W[0], 2, 2, 0)]
    with pytest.raises(ValueError, match="not reserved"):
        idx.unreserve(W[0], [P[0], P[0]])
    assert idx.stats().reservations == 2
    for method in (idx.reserve, idx.unreserve):
        with pytest.raises(ValueError, match="not in the index"):
            method(W[1], P)


def test_workers_come_and_go() -> None:
    idx = index(W[0], W[1])
    with pytest.raises(ValueError, match="already"):
        idx.add_worker(W[0], *REVISIONS)
    for worker in W[:2]:
        idx.apply(worker, stored([1, 2], T[:4]))
        idx.reserve(worker, P[:3])
    idx.remove_worker(W[0])
    idx.remove_worker(W[0])
    assert W[0] not in idx
    assert found(idx, P) == [Match(W[1], 3, 1, 0)]
    idx.apply(W[0], stored([1], T[:2]))
    idx.clear(W[0])
    assert idx.stats().unknown_worker_events == 1
    assert idx.stats(W[0]) == IndexStats()
    assert idx.block_size(W[0]) is None
    idx.add_worker(W[2], "other", "tokenizer")
    assert found(idx, P) == [Match(W[1], 3, 1, 0)]
    idx.apply(W[2], stored([1], T[:2]))
    assert found(idx, P) == [Match(W[1], 3, 1, 0)]  # another model revision shares nothing


def test_memory_is_estimated_to_within_a_third() -> None:
    rng = random.Random(1)
    idx = index(W[0])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for at in range(600):
            # Numbers of its own for every event, as they come off the wire.
            idx.apply(W[0], stored([rng.getrandbits(63) for _ in range(32)], [at] * 64))
        took = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert took > 1_000_000
    assert idx.memory_bytes() == pytest.approx(took, rel=1 / 3)
    idx.clear(W[0])
    assert idx.memory_bytes() < took / 3  # tables keep their size


def test_block_size_is_learned() -> None:
    idx = index(W[0])
    assert idx.block_size(W[0]) is None
    idx.apply(W[0], stored([1], T[:4], size=4))
    assert idx.block_size(W[0]) == 4
    idx.apply(W[0], AllBlocksCleared())
    assert idx.block_size(W[0]) is None


def test_nothing_is_left_when_everything_is_removed() -> None:
    """Memory is bounded by live blocks: no handle, count or block outlives its last copy."""
    rng = random.Random(4)
    idx = index(*W)
    live: list[tuple[WorkerId, int, Tier]] = []
    for step in range(2000):
        worker, root = rng.choice(W), rng.randrange(50)
        idx.apply(worker, stored([root, root + 1000], [root, 1, root, 2]))
        live += [(worker, root, Tier.GPU), (worker, root + 1000, Tier.GPU)]
        if step % 3 == 0:
            idx.apply(worker, stored([root], [], size=0, tier=Tier.CPU))
            live.append((worker, root, Tier.CPU))
    rng.shuffle(live)
    for worker, handle, tier in live:
        idx.apply(worker, BlockRemoved((handle,), tier))
    assert idx.stats() == IndexStats()
    assert not idx._states.of
    for entry in idx._workers.values():
        assert not entry.engine._handles
        assert not entry.engine._copies
        assert not entry.engine._totals


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 200])
def test_long_runs_match_like_a_block_by_block_walk(size: int) -> None:
    rng = random.Random(size)
    idx = index(*W)
    tokens = [rng.randrange(1000) for _ in range(2 * size)]
    hashes = prompt(tokens)
    gpu: dict[WorkerId, set[int]] = {}
    reserved: dict[WorkerId, range] = {}
    for worker in W:
        idx.apply(worker, stored(range(size), tokens))
        lost = [at for at in range(size) if rng.random() < 0.03]
        idx.apply(worker, BlockRemoved(tuple(lost)))
        gpu[worker] = set(range(size)) - set(lost)
        reserved[worker] = range(rng.randrange(size))
        idx.reserve(worker, hashes[: len(reserved[worker])])
    expected = []
    for worker in W:
        blocks = next(
            (at for at in range(size) if at not in gpu[worker] and at not in reserved[worker]), size
        )
        if blocks:
            only = sum(at not in gpu[worker] for at in range(blocks))
            expected.append(Match(worker, blocks, only, 0))
    assert found(idx, hashes) == expected


def test_uniform_stretches_are_counted_exactly() -> None:
    idx = index(*W)
    tokens = list(range(2000))
    hashes = prompt(tokens)
    for worker, blocks in zip(W, (1000, 999, 640, 63), strict=True):
        idx.apply(worker, stored(range(blocks), tokens[: 2 * blocks]))
    idx.reserve(W[3], hashes[:700])
    assert [tuple(match[1:3]) for match in idx.match(hashes)] == [(1000, 0), (999, 0), (640, 0), (700, 637)]


@pytest.mark.parametrize("name", RECORDINGS)
def test_index_of_a_recording_equals_the_plain_model(name: str) -> None:
    worker = W[0]
    idx, mirror = index(worker), Mirror()
    mirror.add(worker, *REVISIONS)
    prompts: dict[int | bytes, tuple[BlockStored, list[int]]] = {}
    twice = False
    for count, payload in enumerate(payloads(name)):
        for event in decode(payload).events:
            full = not (isinstance(event, BlockStored) and event.spec_kind == "sliding_window")
            idx.apply(worker, event)
            if full:
                mirror.workers[worker].apply(event)
                twice |= any(held > 1 for held in mirror.workers[worker].copies.values())
            if isinstance(event, BlockStored) and full:
                above = prompts[event.parent][1] if event.parent is not None else []
                tokens = [*above, *event.token_ids]
                for at, handle in enumerate(event.block_hashes):
                    end = len(above) + (at + 1) * event.block_size
                    prompts[handle] = (event, tokens[:end])
        if count % 40 == 0:
            compare(idx, mirror, worker, prompts)
    compare(idx, mirror, worker, prompts)
    stats = idx.stats(worker)
    assert stats.gpu_copies == sum(mirror.workers[worker].copies.values())
    assert stats.blocks == len(mirror.workers[worker].bound)
    assert (stats.orphans, stats.unknown_removes, stats.malformed) == (0, 0, 0)
    if name == "evict_bs32":
        assert twice, "this recording is here for its duplicates"


def compare(idx, mirror, worker, prompts) -> None:
    for event, tokens in prompts.values():
        salts = {keys[-1] for keys in event.extra_keys or () if keys and keys[-1] != event.lora_name}
        for salt in {None, *salts}:
            hashes = prompt(tokens, event.block_size, adapter=event.lora_name, cache_salt=salt)
            names = mirror.blocks.prompt((*REVISIONS, event.lora_name, salt), tokens, event.block_size)
            matched = {match.worker: tuple(match[1:4]) for match in idx.match(hashes)}
            assert matched == mirror.match(names)


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
SPACES = st.sampled_from([(None, None), (None, "s"), ("a", None), ("a", "a")])
WORKERS = st.sampled_from(W[:3])
TIERS = st.sampled_from([Tier.GPU, Tier.GPU, Tier.GPU, Tier.CPU, Tier.DISK])


class IndexMachine(RuleBasedStateMachine):
    """Random engine events and reservations; the plain model says what must be found."""

    @initialize()
    def start(self) -> None:
        self.index = KvIndex()
        self.mirror = Mirror()
        self.reservations: list[tuple[WorkerId, list[int], list[int]]] = []
        for worker in W[:2]:
            self.add(worker)

    def add(self, worker: WorkerId) -> None:
        revisions = ("model-2" if worker == W[1] else "model", "tokenizer")
        self.index.add_worker(worker, *revisions)
        self.mirror.add(worker, *revisions)

    @staticmethod
    def handle(space, path) -> int | bytes:
        name = f"{space}{path}"
        return name.encode() if space[1] else hash(name)

    def both(self, worker, event) -> None:
        self.index.apply(worker, event)
        if worker in self.mirror.workers:
            self.mirror.workers[worker].apply(event)

    @rule(
        worker=WORKERS, space=SPACES, path=PATHS, skip=st.integers(0, 3), tier=TIERS, image=st.integers(0, 9)
    )
    def store(self, worker, space, path, skip, tier, image) -> None:
        adapter, salt = space
        skip = min(skip, len(path) - 1)
        blocks = [path[: at + 1] for at in range(skip, len(path))]
        keys: list[tuple[object, ...] | None] = []
        for block in blocks:
            key = [adapter] if adapter else []
            if image == 9 and len(block) == 2:
                key.append(("image", block[0]))
            if salt and len(block) == 1:
                key.append(salt)
            keys.append(tuple(key) or None)
        mark = "image" if image == 9 and len(path) > 1 else ""
        handles = [self.handle(space, (block, mark if len(block) > 1 else "")) for block in blocks]
        parent = None
        if skip:
            parent = self.handle(space, (path[:skip], mark if skip > 1 else ""))
        tokens = [token for block in blocks for token in (block[-1], 7)]
        self.both(
            worker, stored(handles, tokens, parent, lora_name=adapter, extra_keys=tuple(keys), tier=tier)
        )

    @rule(worker=WORKERS, space=SPACES, path=PATHS, tier=TIERS)
    def offload(self, worker, space, path, tier) -> None:
        self.both(worker, stored([self.handle(space, (path, ""))], [], size=0, tier=tier))

    @rule(worker=WORKERS, space=SPACES, path=PATHS, tier=TIERS, mark=st.sampled_from(["", "", "image"]))
    def remove(self, worker, space, path, tier, mark) -> None:
        self.both(worker, BlockRemoved((self.handle(space, (path, mark)),), tier))

    @rule(worker=WORKERS, at=st.integers(0, 100))
    def remove_held(self, worker, at) -> None:
        if worker in self.mirror.workers:
            held = [key for key, count in self.mirror.workers[worker].copies.items() if count]
            if held:
                handle, tier = held[at % len(held)]
                self.both(worker, BlockRemoved((handle,), tier))

    @rule(worker=WORKERS, path=PATHS)
    def other_group(self, worker, path) -> None:
        event = stored([self.handle((None, None), (path, ""))], [1, 7], group=1, spec_kind="sliding_window")
        self.index.apply(worker, event)

    @rule(worker=WORKERS, how=st.sampled_from(["event", "call"]), dice=st.integers(0, 3))
    def clear(self, worker, how, dice) -> None:
        if dice:
            return
        if how == "event":
            self.both(worker, AllBlocksCleared())
        else:
            self.index.clear(worker)
            if worker in self.mirror.workers:
                self.mirror.workers[worker].clear()

    @rule(worker=WORKERS, dice=st.integers(0, 3))
    def toggle(self, worker, dice) -> None:
        if worker not in self.mirror.workers:
            self.add(worker)
        elif not dice:
            self.index.remove_worker(worker)
            del self.mirror.workers[worker]
            self.reservations = [entry for entry in self.reservations if entry[0] != worker]

    def prompt(self, worker, space, path) -> tuple[list[int], list[int]]:
        revisions = self.mirror.workers[worker].revisions
        tokens = [token for block in path for token in (block, 7)]
        hashes = chain(tokens, 2, Namespace(*revisions, *space).seed)
        return hashes, self.mirror.blocks.prompt((*revisions, *space), tokens, 2)

    @rule(worker=WORKERS, space=SPACES, path=PATHS)
    def reserve(self, worker, space, path) -> None:
        if worker in self.mirror.workers:
            hashes, names = self.prompt(worker, space, path)
            self.index.reserve(worker, hashes)
            self.mirror.workers[worker].reserved.update(names)
            self.reservations.append((worker, hashes, names))

    @precondition(lambda self: self.reservations)
    @rule(at=st.integers(0, 100))
    def unreserve(self, at) -> None:
        worker, hashes, names = self.reservations.pop(at % len(self.reservations))
        self.index.unreserve(worker, hashes)
        self.mirror.workers[worker].reserved.subtract(names)

    @rule(worker=WORKERS, space=SPACES, path=PATHS)
    def unbalanced(self, worker, space, path) -> None:
        if worker not in self.mirror.workers:
            return
        hashes, names = self.prompt(worker, space, path)
        reserved = self.mirror.workers[worker].reserved
        if any(not reserved[name] for name in names):
            with pytest.raises(ValueError, match="not reserved"):
                self.index.unreserve(worker, hashes)

    @invariant()
    def finds_what_the_model_finds(self) -> None:
        for worker in self.mirror.workers:
            for space in [(None, None), (None, "s"), ("a", None), ("a", "a"), ("a", "s")]:
                for leaf in range(16):
                    path = [leaf >> bit & 1 for bit in range(4)]
                    hashes, names = self.prompt(worker, space, path)
                    matched = {match.worker: tuple(match[1:4]) for match in self.index.match(hashes)}
                    assert matched == self.mirror.match(names)

    @invariant()
    def counts_agree(self) -> None:
        for worker, state in self.mirror.workers.items():
            stats = self.index.stats(worker)
            gpu = sum(count for (_, tier), count in state.copies.items() if tier is Tier.GPU)
            assert stats.gpu_copies == gpu
            assert stats.gpu_copies + stats.slower_copies == sum(state.copies.values())
            assert stats.blocks == len(state.bound)
            assert stats.reservations == sum(state.reserved.values())


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_chained_events_keep_the_rules_for_parents_copies_and_removal():
    held = index(W[0])
    held.apply(W[0], BlockStored((3, 4), 2, (), 16, chained=True))
    assert held.stats().orphans == 2
    assert held.match([1, 2, 3, 4]) == []
    held.apply(W[0], BlockStored((1, 2), None, (), 16, chained=True))
    assert [match.blocks for match in held.match([1, 2, 3, 4])] == [4]
    held.apply(W[0], BlockStored((1, 2), None, (), 16, chained=True))
    held.apply(W[0], BlockRemoved((2,)))
    assert [match.blocks for match in held.match([1, 2, 3, 4])] == [4]
    held.apply(W[0], BlockRemoved((2,)))
    assert [match.blocks for match in held.match([1, 2, 3, 4])] == [1]


def test_what_is_forgotten_by_its_handle_has_no_copies_left():
    index = KvIndex()
    index.add_worker(core.worker(0), "model", "tokenizer")
    index.apply(core.worker(0), core.stored(range(48)))
    index.apply(core.worker(0), core.stored(range(48)))  # each block twice
    blocks = core.hashes(range(49))
    assert list(index.confirmed(core.worker(0))) == blocks
    assert index.held(core.worker(0), (2, 77)) == {2: blocks[1]}
    index.forget(core.worker(0), 2)
    assert index.held(core.worker(0), (2,)) == {}
    assert [match.blocks for match in index.match(blocks)] == [1]
    index.forget(core.worker(0), 99)
    index.forget(core.worker(9), 1)
    assert list(index.confirmed(core.worker(9))) == []


def test_how_much_was_sent_there_is_told_whatever_events_say():
    idx = index(W[0], W[1])
    idx.apply(W[0], stored([1, 2, 3, 4], T))
    idx.reserve(W[0], P[:2])
    idx.reserve(W[1], P[:3])
    assert idx.match(P) == [Match(W[0], 4, 0, 0, 2), Match(W[1], 3, 3, 0, 3)]
    assert [idx.reserved_blocks(worker) for worker in W[:3]] == [2, 3, 0]


def test_a_handle_that_an_event_names_twice_has_two_copies():
    idx = index(W[0])
    idx.apply(W[0], stored([1, 2, 2], T[:6]))
    assert (idx.stats().blocks, idx.stats().gpu_copies) == (2, 3)
    idx.apply(W[0], BlockRemoved((2, 2, 1)))
    assert idx.stats() == IndexStats()
    assert idx.entries == 0


CEILING_EVENTS = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 5)),
    max_size=60,
)


@given(CEILING_EVENTS, st.integers(1, 12))
def test_above_the_ceiling_the_oldest_leaf_is_given_up_and_never_a_middle_block(events, ceiling):
    """A handle is its own path, so it shows what hangs below what."""
    idx = index(*W[:2], max_blocks=ceiling)
    stored_at: dict[tuple[int, bytes], int] = {}
    touched_at: dict[tuple[int, bytes], int] = {}  # when it, or anything below it, was stored last
    for now, (at, path, skip) in enumerate(events):
        worker, names = W[at], [bytes(path[:cut]) for cut in range(1, len(path) + 1)]
        known = [name in idx.held(worker, names) for name in names]
        first = min(skip, [*known, False].index(False))
        if first == len(path):
            continue
        tokens = [token for bit in path[first:] for token in (bit, 7)]
        idx.apply(worker, stored(names[first:], tokens, names[first - 1] if first else None))
        stored_at |= {(at, name): now for name, held in zip(names, known, strict=True) if not held}
        touched_at |= {(at, name): now for name in names}
        left = {(at, name) for at, name in stored_at if idx.held(W[at], (name,))}
        assert len(left) == idx.entries == min(ceiling, len(stored_at))
        inner = {(which, name[:cut]) for which, name in left for cut in range(1, len(name))}
        assert inner <= left, "a middle block is gone"
        given_up = [stored_at.pop(key) for key in stored_at.keys() - left]
        assert all(max(given_up, default=0) <= touched_at[leaf] for leaf in left - inner)


def test_what_was_given_up_is_unknown_its_removal_harmless_and_its_children_kept_aside():
    idx = index(W[0], W[1], max_blocks=4)
    idx.apply(W[0], stored([1, 2, 3, 4], T))
    idx.apply(W[1], stored([11], T[:2]))
    assert found(idx, P) == [Match(W[0], 3, 0, 0), Match(W[1], 1, 0, 0)]
    idx.apply(W[1], stored([12, 13], T[2:6], parent=11))
    assert found(idx, P) == [Match(W[0], 1, 0, 0), Match(W[1], 3, 0, 0)]
    assert (idx.stats(W[0]).evicted, idx.stats(W[1]).evicted) == (3, 0)
    idx.apply(W[0], BlockRemoved((4, 3)))
    idx.apply(W[0], stored([5], [9, 9], parent=2))
    stats = idx.stats(W[0])
    assert (stats.unknown_removes, stats.orphans, stats.blocks) == (0, 1, 1)
    assert idx.entries == 4
    assert idx.stats().evicted == 3
    idx.apply(W[0], BlockRemoved((2,)))
    assert idx.stats(W[0]).unknown_removes == 0
    idx.apply(W[0], BlockRemoved((77,)))  # more than was given up: that one is the engine's
    assert idx.stats(W[0]).unknown_removes == 1
