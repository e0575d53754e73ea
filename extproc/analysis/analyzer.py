"""Prompts of a log, in its order, to everything the report says of them. Memory is bounded: see `Settings`.

Prompts that can share KV are those of one model (or adapter) and cache salt. What a prompt repeats is the
longest beginning it has in common with any earlier one. How that beginning came to be shared (its use):

- `session`: an earlier prompt whole, continued; `identical`: an earlier prompt again;
- `template`: a beginning that many prompts have (more than 20, and 5 % of all so far), but for a few tokens;
- `document`: a longer one that fewer have;
- `unique`: less than one block.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from extproc.analysis.breakers import ANCHORS, FULL, BreakerFinder, Decoder
from extproc.analysis.placement import Fleet
from extproc.analysis.prefix_tree import Node, PrefixTree
from extproc.analysis.prompts import LineResult, Prompt
from extproc.analysis.tally import AGES, LENGTHS, Buckets, Groups

THRESHOLDS = (1_000, 4_000, 10_000, 32_000, 100_000)
_EXAMPLES = 5
_MOST_POOLS = 8
_TEMPLATE_USES = 20
_TEMPLATE_SHARE = 0.05
_TEMPLATE_PART = 0.9  # of what is shared: the rest is chance


@dataclass(frozen=True, slots=True)
class Settings:
    """What is estimated, and within which bounds.

    Attributes:
        block_size: tokens per KV block.
        replicas: fleet sizes to try.
        cache_tokens: KV cache sizes to try, tokens per replica.
        tree_bytes: most bytes of prompts remembered.
        compared: prompts compared before only a share of them is (see `breakers`).
        anchors: places remembered to find text again (see `breakers`).
        seed: of random placement and of what is compared.
    """

    block_size: int = 16
    replicas: tuple[int, ...] = (2, 4, 8)
    cache_tokens: tuple[int, ...] = (100_000, 500_000)
    tree_bytes: int = 512 * 1024 * 1024
    compared: int = FULL
    anchors: int = ANCHORS
    seed: int = 0


@dataclass(slots=True)
class LineCounts:
    """Lines of the log, by what became of them. `bad` and `unsupported` count reasons."""

    lines: int = 0
    skipped: int = 0
    duplicates: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Long:
    """Prompts of at least so many tokens, and how many of them begin with as many repeated ones."""

    prompts: int = 0
    resent: int = 0


Pool = dict[tuple[int, int, bool], Fleet]
"""Fleets of one model, by replicas, cache tokens, and whether placed by prefix."""


class Analyzer:
    """See the module. Everything public is for the report."""

    def __init__(self, settings: Settings, decode: Decoder) -> None:
        self.settings = settings
        self.tree = PrefixTree(settings.tree_bytes, self._split)
        self.finder = BreakerFinder(
            decode,
            Random(settings.seed + 1),  # noqa: S311 - it draws a sample
            full=settings.compared,
            anchors=settings.anchors,
        )
        self._rng = Random(settings.seed)  # noqa: S311 - a simulation
        self.pools: dict[str, Pool] = {}
        self._marks = {n: sum(settings.replicas[:at]) for at, n in enumerate(settings.replicas)}
        self.spread_hits = dict.fromkeys(settings.replicas, 0)  # random placement, unlimited caches
        self.counts = LineCounts()
        self.examples: dict[str, list[str]] = {}
        self._vllm_form: dict[str, str] = {}
        self.requests = 0
        self.tokens = 0
        self.repeated = 0
        self.repeated_blocks = 0
        self.longest = 0
        self.lengths = Buckets(LENGTHS)
        self.shared = Buckets(LENGTHS)
        self.shared_tokens = [0] * (len(LENGTHS) + 1)
        self.ages = Buckets(AGES)
        self.long = {threshold: Long() for threshold in THRESHOLDS}
        self.groups = {name: Groups() for name in ("use", "class", "tenant", "template", "model", "session")}
        self.forms: Counter[str] = Counter()
        self.first_time: float | None = None
        self.last_time: float | None = None

    def add_line(self, source: str, result: LineResult) -> None:
        """Count a line of the log `source`."""
        self.counts.lines += 1
        where = f"{source}:{result.number}"
        if result.skipped:
            self.counts.skipped += 1
        if result.bad is not None:
            self._example(self.counts.bad, result.bad, where)
        if result.unsupported is not None:
            self._example(self.counts.unsupported, result.unsupported, where)
        for prompt in result.prompts:
            if prompt.form.startswith("vllm-"):
                form = self._vllm_form.setdefault(source, prompt.form)
                if form != prompt.form:  # the same request, told in another way
                    self.counts.duplicates += 1
                    continue
            self.add(prompt)

    def add(self, prompt: Prompt) -> None:
        """Take in one prompt; prompts come in the log's order."""
        length = len(prompt.tokens) // 4
        if not length:
            return
        settings = self.settings
        shared, path = self.tree.add(prompt.namespace, prompt.tokens)
        size = settings.block_size
        blocks = min(shared, length - 1) // size * size
        use = self._use(path, shared, length)
        self._ages(path, prompt.time)
        self.tree.touch(path, prompt.time)
        drawn = {replicas: self._rng.randrange(replicas) for replicas in settings.replicas}
        self._spread(path, length, drawn)
        random_hits, prefix_hits = self._place(prompt.model, path, length, drawn)
        lost = self.finder.look(prompt.tokens, shared, path, prompt.anchors, prompt.template)
        self.requests += 1
        self.tokens += length
        self.repeated += shared
        self.repeated_blocks += blocks
        self.longest = max(self.longest, length)
        self.lengths.add(length)
        self.shared.add(shared)
        self.shared_tokens[bisect_left(LENGTHS, shared)] += shared
        for threshold, long in self.long.items():
            if length >= threshold:
                long.prompts += 1
                long.resent += shared >= threshold
        self.forms[prompt.form] += 1
        names = {
            "use": use,
            "class": prompt.traffic_class,
            "tenant": prompt.tenant,
            "template": prompt.template,
            "model": prompt.model,
            "session": prompt.session,
        }
        for kind, name in names.items():
            if name is not None:
                self.groups[kind].of(name).add(length, blocks, random_hits, prefix_hits, lost)

    @property
    def middle(self) -> tuple[int, int]:
        """The (replicas, cache tokens) that groups and the verdict are given for: the middle ones."""
        replicas, sizes = self.settings.replicas, self.settings.cache_tokens
        return replicas[len(replicas) // 2], sizes[len(sizes) // 2]

    # --- inside -----------------------------------------------------------------------------------

    def _example(self, counter: Counter[str], reason: str, where: str) -> None:
        counter[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(where)

    def _use(self, path: Sequence[Node], shared: int, length: int) -> str:
        """How the shared beginning came to be shared. The path's counts have this prompt in them."""
        if shared < self.settings.block_size:
            return "unique"
        last = path[-1]
        if shared == length:
            return "identical" if last.ends > 1 else "document"
        if path[-2].ends:
            return "session"
        least = max(_TEMPLATE_USES, _TEMPLATE_SHARE * self.tree.requests)
        wide = max((node.end for node in path if node.count > least), default=0)
        return "template" if wide >= _TEMPLATE_PART * shared else "document"

    def _ages(self, path: Sequence[Node], now: float | None) -> None:
        if now is None:
            return
        self.first_time = now if self.first_time is None else min(self.first_time, now)
        self.last_time = now if self.last_time is None else max(self.last_time, now)
        seen = next((node.last_time for node in reversed(path) if node.last_time is not None), None)
        if seen is not None and path[0].count > 1:
            self.ages.add(max(0.0, now - seen))

    def _spread(self, path: Sequence[Node], length: int, drawn: dict[int, int]) -> None:
        """Random placement on replicas that forget nothing: a bit per replica that has seen a node."""
        size = self.settings.block_size
        for replicas, offset in self._marks.items():
            bit = 1 << (offset + drawn[replicas])
            hit = 0
            for node in path:
                if node.marks & bit:
                    hit = node.end
                else:
                    node.marks |= bit
            self.spread_hits[replicas] += min(hit, length - 1) // size * size

    def _place(self, model: str, path: Sequence[Node], length: int, drawn: dict[int, int]) -> tuple[int, int]:
        """Route through every fleet; hits of the middle one, placed at random and by prefix."""
        if model not in self.pools and len(self.pools) >= _MOST_POOLS:
            model = next(reversed(self.pools))
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = self._pool()
        hits = {
            key: fleet.route(path, length, None if key[2] else drawn[key[0]]) for key, fleet in pool.items()
        }
        middle = self.middle
        return hits[(*middle, False)], hits[(*middle, True)]

    def _pool(self) -> Pool:
        settings = self.settings
        return {
            (replicas, tokens, prefix): Fleet(
                replicas,
                tokens // settings.block_size,
                settings.block_size,
                Random(self._rng.random()),  # noqa: S311 - a simulation
            )
            for replicas in settings.replicas
            for tokens in settings.cache_tokens
            for prefix in (False, True)
        }

    def _split(self, upper: Node, lower: Node) -> None:
        for pool in self.pools.values():
            for fleet in pool.values():
                fleet.split(upper, lower)
