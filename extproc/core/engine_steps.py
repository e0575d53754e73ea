"""When an engine was seen to work, and what may have been sent to it that its figures do not tell yet.

vLLM tells its gauges as of the end of a step. While one takes long, or the engine hangs, or just until the
next scrape, whoever came since is in no figure. Figures that differ between two scrapes say that a step has
ended between them. It may have begun before the first of the two, or right after: what was sent after that
scrape may not be in the figures, nor what waited for its prefill then.

    unseen = uncovered tokens sent there, ever - those of prompts whose prefill had ended at that scrape, as
             our own clock tells
             + max(queued, growth) of other routers' requests

`growth` is what their requests hold more now than they told then: what they have sent is not told. So
`unseen` is too much by what was taken in after that scrape by the steps that have ended since, and by what
requests sent since have in common. Left out is what is generated since, little in a second or two; and what
was in the cache and in no use at the end of the step, and is used since: most of what requests hit, others
use already, and a whole history would count twice where the last turn of its chat has just ended.

    the figures are                 that scrape is
    new at this one, and were at    the last one: steps are shorter than the time between scrapes
    the last one
    new at this one only            the one before those were found that stood still until now: the step that
                                    has ended may have begun as long ago
    as they were                    what it was: the engine is idle, or hangs

A step that is longer than the time between scrapes, and shorter than twice that, may pass for a short one.
What came while it ran is then missed for one scrape, unless it was queued by our clock, as it is behind the
prefill that made the step long. An engine that tells no counters is taken to end a step before each scrape.
Before the second scrape nothing is taken to be in the figures.

Tokens; times are monotonic seconds.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.core.peer_loads import ToldLoad
from extproc.core.types import EngineMetrics


class Mark(NamedTuple):
    """What was so at one scrape.

    Attributes:
        at: when it came.
        computed: uncovered tokens of ours whose prefill there had ended, ever.
        told: tokens of context that other routers told to have there.
    """

    at: float
    computed: int
    told: int


NEVER = Mark(-math.inf, 0, 0)


@dataclass(slots=True)
class EngineSteps:
    """The steps of one engine, as its scrapes tell.

    Attributes:
        last: the scrape before the one at which its figures were last new.
        last_but_one: the same of the time before: a step has begun after it and has ended.
        seen: the scrape since which things may have been sent that are not in its figures.
    """

    last: Mark = NEVER
    last_but_one: Mark = NEVER
    seen: Mark = NEVER
    _figures: tuple[float | None, ...] | None = field(default=None, init=False)
    _scraped: Mark = field(default=NEVER, init=False)
    _works: bool = field(default=True, init=False)  # its figures were new at the last scrape

    def note(self, metrics: EngineMetrics, mark: Mark) -> None:
        """It was scraped."""
        figures = (
            metrics.generation_tokens,
            metrics.prompt_tokens,
            metrics.prefix_cache_queries,
            metrics.running,
            metrics.waiting,
            metrics.kv_usage,
        )
        if self._figures is not None:
            if figures != self._figures or metrics.generation_tokens is None:
                self.last_but_one, self.last = self.last, self._scraped
                self.seen = self.last if self._works else self.last_but_one
                self._works = True
            else:
                self._works = False
        self._figures, self._scraped = figures, mark

    def unseen(self, sent: int, theirs: ToldLoad) -> float:
        """Tokens that may be held there beyond what the figures tell. See the module.

        Args:
            sent: uncovered tokens of ours sent there, ever.
            theirs: what other routers tell to have there now.
        """
        seen = self.seen
        return sent - seen.computed + max(theirs.queued_prefill_tokens, theirs.context_tokens - seen.told)
