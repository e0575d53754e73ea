"""What kind of prompt a request has, learned from how its prefix is reused.

Theory of operation
-------------------
Every prompt is a path of block hashes. We keep nodes at marks along it (blocks 1 to 8, then four to each
doubling, and the prompt's last block), so a prompt of n blocks costs about 4 log2(n) of them. A node counts

- *uses*: prompts that went through it, and since when (its *lifetime*, seconds);
- *breadth*: different ways in which they went on;
- whether a prompt *ended* there, and how many went on from that end.

A new prompt is judged by the deepest node it has in common with earlier ones (its *depth*), in this order:

    unique            nothing in common, or less than a tenth of the prompt
    session           it goes on where an earlier prompt ended, and hardly any other did
    system-template   many went on differently from there (breadth), over some time (lifetime), and they are
                      a considerable share of all prompts for that model since
    rag-set           the paths had parted twice or more before: combinations of shared pieces
    document          anything else: one shared text with different ends

Nodes are bounded in number, and their memory is fixed ([`prefix_nodes`](prefix_nodes.py)): about the least
recently used makes room, the deeper before the shallower; one that was not used for an hour starts anew.
Breadth may count a continuation again whose node had been dropped.
"""

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache

from extproc.core.prefix_nodes import NOWHERE, PrefixNodes


class PrefixClass(StrEnum):
    """Kinds of prompts: in the decision log, in metrics, and in what is learned about lengths."""

    SYSTEM_TEMPLATE = "system-template"
    DOCUMENT = "document"
    SESSION = "session"
    RAG_SET = "rag-set"
    UNIQUE = "unique"


_FINE = 8  # blocks up to which each has a mark; from there on, marks are at k * 2^n with k from 4 to 7
_MIN_SHARED = 0.1  # of the prompt
_SESSION_TURNS = 2  # that may go on from one end: an answer may be asked for again
_TEMPLATE_BREADTH = 16
_TEMPLATE_SHARE = 0.1  # of the prompts for its model
_TEMPLATE_LIFETIME_S = 60.0
_RAG_PARTINGS = 2
_MAX_GROUPS = 1024


class PrefixClasses:
    """Learns from every prompt it is shown. `max_nodes` sets its memory, some 20 MiB at most by default.

    That is the last 2,000 prompts or so that have nothing in common, of some 8,000 tokens each in blocks of
    16; prompts that have much in common share their nodes.
    """

    def __init__(self, max_nodes: int = 65_536) -> None:
        self._nodes = PrefixNodes(max_nodes)
        self._prompts: dict[tuple[str, ...], int] = {}
        self._passing: tuple[Sequence[int], float, int] | None = None  # what `settle` puts down

    def __len__(self) -> int:
        self.settle()
        return len(self._nodes)

    def observe(self, group: tuple[str, ...], chain: Sequence[int], now: float) -> PrefixClass:
        """The class of a prompt as those before it tell; for those that come next it counts among them.

        It is put down by the next `settle`, or by the next prompt: nobody waits for that.

        Args:
            group: pool, model and its revision; shares are of the prompts in one group.
            chain: hashes of its full blocks, in order.
            now: seconds, monotonic.
        """
        self.settle()
        marks = _marks(len(chain))
        seen = self._prompts.pop(group, 0)
        if len(self._prompts) >= _MAX_GROUPS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[group] = seen + 1
        keys = [chain[mark] for mark in marks]
        known = self._nodes.known(keys, now)
        end = self._earlier_end(chain, marks[len(known) - 1], now) if known else NOWHERE
        found = self._judge(known, end, marks, seen, now)
        if end != NOWHERE:
            self._nodes.continued[end] += 1
        self._passing = (keys, now, seen)
        return found

    def settle(self) -> None:
        """Put down the latest prompt. Changes no answer."""
        if self._passing is not None:
            self._nodes.pass_through(*self._passing)
            self._passing = None

    def _earlier_end(self, chain: Sequence[int], start: int, now: float) -> int:
        """The last place, at `start` or deeper, from which the prompt goes on where an earlier one ended."""
        return self._nodes.last_end(chain[start : len(chain) - 1], now)

    def _judge(
        self, known: Sequence[int], end: int, marks: Sequence[int], seen: int, now: float
    ) -> PrefixClass:
        if end != NOWHERE and self._nodes.continued[end] < _SESSION_TURNS:
            return PrefixClass.SESSION
        if not known or marks[len(known) - 1] + 1 < _MIN_SHARED * (marks[-1] + 1):
            return PrefixClass.UNIQUE
        *above, last = known
        if self._is_wide(last, seen) and now - self._nodes.first[last] >= _TEMPLATE_LIFETIME_S:
            return PrefixClass.SYSTEM_TEMPLATE
        breadth = self._nodes.breadth
        partings = sum(breadth[node] > 1 and not self._is_wide(node, seen) for node in above)
        return PrefixClass.RAG_SET if partings >= _RAG_PARTINGS else PrefixClass.DOCUMENT

    def _is_wide(self, node: int, seen: int) -> bool:
        share = self._nodes.uses[node] / max(1, seen - self._nodes.born[node])
        return self._nodes.breadth[node] >= _TEMPLATE_BREADTH and share >= _TEMPLATE_SHARE


@lru_cache(maxsize=4096)
def _marks(blocks: int) -> tuple[int, ...]:
    """Positions of the marks in a chain of so many blocks, in order; the last block is always one."""
    marks: list[int] = []
    count, step = 1, 1
    while count < blocks:
        marks.append(count - 1)
        if count >= _FINE * step:
            step *= 2
        count += step
    if blocks:
        marks.append(blocks - 1)
    return tuple(marks)
