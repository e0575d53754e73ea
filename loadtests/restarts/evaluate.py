"""What restarts cost, from what each request found cached. Pure.

The share of cached tokens is looked at in moving windows, because one request is nearly all or nothing:
its document is there, or not. A window has to be so wide that the share does not move by `LIMIT_POINTS` where
nothing is restarted; how wide that is, the control periods of the same run tell. A moving window shows a
short loss for longer than it was, by up to its width, and less deep; `lost_points_s` does not depend on it.

Times are in seconds on one clock, shares from 0 to 1, drops in points (hundredths of all prompt tokens).
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

LIMIT_POINTS = 5.0
LIMIT_S = 10.0
STEP_S = 0.5
WIDTHS_S = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that was answered: when it was sent, its prompt's tokens, and those found cached."""

    at: float
    prompt: int
    cached: int


@dataclass(frozen=True, slots=True)
class Period:
    """From `begin` until before `end`."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Dip:
    """How far the share fell below `baseline` in a period.

    Attributes:
        baseline: share without restarts.
        deepest_points: of the lowest window; negative if none was below.
        below_s: how long windows were more than `LIMIT_POINTS` below, all together.
        lost_points_s: points below the baseline, added up over the period: 20 points for 3 seconds are 60.
    """

    baseline: float
    deepest_points: float
    below_s: float
    lost_points_s: float

    @property
    def within(self) -> bool:
        """Not below by more than the limit for long."""
        return self.below_s < LIMIT_S


class Timeline:
    """Requests in the order in which they were sent."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        ordered = sorted(samples, key=lambda sample: sample.at)
        self._at = [sample.at for sample in ordered]
        self._prompt = [0, *accumulate(sample.prompt for sample in ordered)]
        self._cached = [0, *accumulate(sample.cached for sample in ordered)]

    def count(self, period: Period) -> int:
        """Requests sent in it."""
        return self._index(period.end) - self._index(period.begin)

    def share(self, period: Period) -> float | None:
        """Of the prompt tokens sent in it, those found cached; None if there were none."""
        first, last = self._index(period.begin), self._index(period.end)
        prompt = self._prompt[last] - self._prompt[first]
        return (self._cached[last] - self._cached[first]) / prompt if prompt else None

    def moving(self, period: Period, width_s: float) -> list[float | None]:
        """Shares of the windows that end in the period, one every `STEP_S`."""
        steps = int(period.seconds / STEP_S + 1e-9)
        ends = [period.begin + (step + 1) * STEP_S for step in range(steps)]
        return [self.share(Period(end - width_s, end)) for end in ends]

    def by_second(self, period: Period) -> list[float | None]:
        """Shares second by second; the last may be cut short."""
        edges = [period.begin + second for second in range(int(period.seconds + 1e-9) + 1)]
        if period.end - edges[-1] > 1e-9:
            edges.append(period.end)
        return [self.share(Period(begin, end)) for begin, end in pairwise(edges)]

    def dip(self, period: Period, baseline: float, width_s: float) -> Dip:
        """What `period` lost. Its first windows reach back to before it."""
        drops = [(baseline - share) * 100.0 for share in self.moving(period, width_s) if share is not None]
        over_all = self.share(period)
        return Dip(
            baseline,
            max(drops, default=0.0),
            STEP_S * sum(drop > LIMIT_POINTS for drop in drops),
            0.0 if over_all is None else (baseline - over_all) * 100.0 * period.seconds,
        )

    def _index(self, at: float) -> int:
        return bisect_left(self._at, at)


@dataclass(frozen=True, slots=True)
class Noise:
    """How far windows of this width fell below their control's own share, though nothing was restarted."""

    width_s: float
    deepest_points: float
    enough: bool  # below `LIMIT_POINTS`


def noise(timeline: Timeline, controls: Sequence[Period]) -> Noise:
    """The narrowest window that tells a loss from chance, else the widest of which a control holds two."""
    shortest = min((control.seconds for control in controls), default=0.0)
    found = Noise(WIDTHS_S[0], 100.0, enough=False)
    for width_s in WIDTHS_S:
        if found.enough or 2.0 * width_s > shortest:
            break
        deepest = max(_control_dip(timeline, control, width_s).deepest_points for control in controls)
        found = Noise(width_s, deepest, deepest < LIMIT_POINTS)
    return found


def _control_dip(timeline: Timeline, control: Period, width_s: float) -> Dip:
    """Windows lie within the control."""
    inner = Period(min(control.begin + width_s, control.end), control.end)
    return timeline.dip(inner, timeline.share(control) or 0.0, width_s)
