"""Breakers: where prompts that are otherwise alike part, what stands there, and how many tokens it costs.

A prompt's text that no prefix covers is compared with the earlier prompt that holds most of it: they are
aligned from their first difference on (`alignment`), and every gap that is followed by equal text again is a
finding. Its cost is the equal tokens up to the next gap: what would have been hits if what stands in the gap
had stood behind them. Tokens that were hits through a third prompt cost nothing.

The earlier prompt is found by anchors: hashes of short token runs, chosen by content so that equal text gives
equal anchors wherever it stands. The last `ANCHORS` new ones are remembered. Up to `FULL` comparisons all are
made; after that a shrinking share, and their findings count for the others (`compared` of `candidates`).
"""

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from random import Random

import xxhash

from extproc.analysis.differences import Finding, differences
from extproc.analysis.prefix_tree import TOKEN_BYTES, Node, PrefixTree, common_bytes
from extproc.analysis.volatile import Kind, shape

GRAM = 8  # tokens hashed by an anchor
_RATE = 16  # one position in so many is an anchor
ANCHORS = 400_000
FULL = 2_000
GROUPS = 1_000
WORTH = 16  # tokens: less lost text than this is not looked into
_REFERENCES = 2
_ENOUGH = 6  # anchors in common, or this share of a short text's:
_PHRASES = 0.2
_POSITIONS = 256
_ALIKE = 0.5
_SAMPLE = 256
_RUNS = re.compile(r"(.)\1+", re.DOTALL)

Decoder = Callable[[bytes], str]


@dataclass(frozen=True, slots=True)
class Anchors:
    """Anchors of one prompt: token positions, ascending, and hashes of what begins there."""

    positions: "array[int]"
    hashes: "array[int]"


def anchors_of(tokens: bytes) -> Anchors:
    """The anchors of a prompt's tokens (bytes of 4-byte integers)."""
    ids = array("I")
    ids.frombytes(tokens)
    positions = array(
        "I",
        [
            at
            for at, (one, two) in enumerate(pairwise(ids))
            if not ((one * 0x9E3779B1 + two * 0x85EBCA77) >> 11) % _RATE
        ],
    )
    while positions and positions[-1] + GRAM > len(ids):
        positions.pop()
    digest = xxhash.xxh3_64_intdigest
    hashes = [digest(tokens[at * TOKEN_BYTES : (at + GRAM) * TOKEN_BYTES]) for at in positions]
    return Anchors(positions, array("Q", hashes))


@dataclass(slots=True)
class Breaker:
    """Findings of one kind behind the same text.

    `tokens` and `requests` are counts, estimated ones once not every prompt is compared. `positions` counts
    token positions at which what breaks begins, of at most 256 different ones.
    """

    kind: Kind
    before: str
    requests: float = 0.0
    tokens: float = 0.0
    positions: Counter[int] = field(default_factory=Counter)
    examples: tuple[str, str] = ("", "")
    labels: Counter[str] = field(default_factory=Counter)


class BreakerFinder:
    """See the module. `decode` turns tokens to text; `rng` chooses what is compared."""

    def __init__(self, decode: Decoder, rng: Random, *, full: int = FULL, anchors: int = ANCHORS) -> None:
        self._decode = decode
        self._rng = rng
        self._full = full
        self._most_anchors = anchors
        self._anchors: dict[int, Node] = {}
        self.breakers: dict[tuple[Kind, str], Breaker] = {}
        self.candidates = 0
        self.compared = 0
        self.recoverable = 0.0
        self.behind_text = 0.0
        self.far_tokens = 0.0
        self.anchors_dropped = 0

    def look(self, tokens: bytes, shared: int, path: Sequence[Node], anchors: Anchors, label: str) -> float:
        """Examine a prompt that has just been added to the tree.

        Args:
            tokens: the prompt.
            shared: its first tokens that were shared already.
            path: its nodes.
            anchors: of `tokens`.
            label: what to count findings for (its template).

        Returns:
            Tokens lost in it to breakers other than differing text (0 if it was not compared).
        """
        lost = 0.0
        if len(tokens) // TOKEN_BYTES - shared >= 2 * WORTH:
            references = self._references(shared, path, anchors, tokens)
            if references:
                lost = self._compare(references, tokens, shared, label)
        self._remember(shared, path, anchors)
        return lost

    # --- which earlier prompts ----------------------------------------------------------------------

    def _references(self, shared: int, path: Sequence[Node], anchors: Anchors, tokens: bytes) -> list[Node]:
        votes: dict[Node, int] = {}
        known = self._anchors
        first = bisect_left(anchors.positions, shared)
        for digest in islice(anchors.hashes, first, None):
            if (node := known.get(digest)) is not None and node.start >= 0:
                votes[node] = votes.get(node, 0) + 1
        # A few anchors among many are phrases that any two texts have in common.
        if votes and max(votes.values()) >= min(_ENOUGH, _PHRASES * (len(anchors.hashes) - first)):
            # Of equals the latest: prompts that are close in time are alike.
            return sorted(votes, key=lambda node: (votes[node], node.last), reverse=True)[:_REFERENCES]
        neighbour = _neighbour(path[-1])
        if neighbour is None:
            return []
        other = PrefixTree.tokens_of(neighbour)
        if other is None or not _alike(other[shared * TOKEN_BYTES :], tokens[shared * TOKEN_BYTES :]):
            return []
        return [neighbour]

    def _remember(self, shared: int, path: Sequence[Node], anchors: Anchors) -> None:
        known, leaf = self._anchors, path[-1]
        for digest in islice(anchors.hashes, bisect_left(anchors.positions, shared - GRAM + 1), None):
            known.pop(digest, None)
            known[digest] = leaf
        surplus = len(known) - self._most_anchors
        if surplus > 0:
            self.anchors_dropped += surplus
            for digest in list(islice(known, surplus)):
                del known[digest]

    # --- comparing ------------------------------------------------------------------------------------

    def _compare(self, references: Sequence[Node], tokens: bytes, shared: int, label: str) -> float:
        self.candidates += 1
        probability = min(1.0, self._full / self.candidates)
        if probability < 1.0 and self._rng.random() >= probability:
            return 0.0
        weight = 1.0 / probability
        self.compared += 1
        best: list[Finding] = []
        most = 0
        for node in references:
            earlier = PrefixTree.tokens_of(node)
            if earlier is None:
                continue
            same = common_bytes(earlier, tokens) // TOKEN_BYTES
            if same * TOKEN_BYTES in (len(earlier), len(tokens)):
                continue  # one continues the other: nothing stands between them
            found = differences(earlier, tokens, same, shared, self._decode)
            cost = sum(finding.cost for finding in found if not finding.far)
            if not best or cost > most:
                best, most = found, cost
        for finding in best:
            if finding.far:
                self.far_tokens += finding.cost * weight
            else:
                self._count(finding, weight, label)
        lost = sum(finding.cost for finding in best if not finding.far and finding.kind is not Kind.TEXT)
        self.recoverable += lost * weight
        self.behind_text += (most - lost) * weight
        return lost * weight

    def _count(self, finding: Finding, weight: float, label: str) -> None:
        before = _RUNS.sub(r"\1", shape(finding.before)).rstrip()[-8:]
        breaker = self.breakers.get((finding.kind, before))
        if breaker is None:
            if len(self.breakers) >= GROUPS:
                before = "…"
            key = (finding.kind, before)
            breaker = self.breakers.setdefault(key, Breaker(finding.kind, before))
        if not breaker.requests:
            breaker.examples = (finding.before, finding.value)
        breaker.requests += weight
        breaker.tokens += finding.cost * weight
        if finding.position in breaker.positions or len(breaker.positions) < _POSITIONS:
            breaker.positions[finding.position] += 1
        if label in breaker.labels or len(breaker.labels) < _POSITIONS:
            breaker.labels[label] += 1


def _neighbour(leaf: Node) -> Node | None:
    """The end of the prompt added last before this one below the same node."""
    parent = leaf.parent
    if parent is None or parent.children is None:
        return None
    at = next((child for child in reversed(parent.children.values()) if child is not leaf), None)
    while at is not None and at.children:
        at = next(reversed(at.children.values()))
    return at


def _alike(one: bytes, other: bytes) -> bool:
    """Whether the first tokens of two texts are mostly the same pairs, in whatever order."""
    first, second = array("I"), array("I")
    first.frombytes(one[: _SAMPLE * TOKEN_BYTES])
    second.frombytes(other[: _SAMPLE * TOKEN_BYTES])
    pairs = Counter(pairwise(first))
    common = (pairs & Counter(pairwise(second))).total()
    return common >= _ALIKE * min(len(first), len(second)) and common >= WORTH
