"""What stands between the equal parts of two prompts, and how much equal text follows it."""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from extproc.analysis.alignment import Run, align
from extproc.analysis.prefix_tree import TOKEN_BYTES
from extproc.analysis.volatile import Kind, equivalence, reordered_object, value_at

LIMIT = 16_384
"""Tokens after the first difference that are aligned."""
FAR = 128
"""A gap of more tokens than this in both prompts: they are not otherwise alike."""
_CONTEXT = 24  # tokens shown and searched around a gap
_OBJECT = 2048  # tokens searched for the end of a JSON object
_LEAST = 16  # tokens; a finding that costs less is none
_WRITTEN = 32  # characters that are equal but for their writing, or it is chance
_PEEK = 8  # characters that must agree before more is compared
_BEYOND = 1 << 62
_STRETCH = 64  # runs looked at for a change of order
_COVERED = 0.8  # of a stretch: then its gaps are numbering and the like, which a fixed order makes equal too
_CLOSE = 4  # tokens: text this soon behind reordered fragments follows them

Decoder = Callable[[bytes], str]


@dataclass(frozen=True, slots=True)
class Finding:
    """One gap. Positions and costs in tokens of the later prompt.

    `position` is where what breaks begins: of a value its first token (two timestamps may begin alike).
    `far`: the prompts differ in more than a value, so this is repeated text rather than a breaker.
    """

    kind: Kind
    position: int
    cost: int
    before: str
    value: str
    far: bool = False


@dataclass(frozen=True, slots=True)
class _Gap:
    """Tokens `start:stop` of the later prompt, `earlier_start:earlier_stop` of the earlier."""

    earlier_start: int
    earlier_stop: int
    start: int
    stop: int


def differences(earlier: bytes, later: bytes, same: int, shared: int, decode: Decoder) -> list[Finding]:
    """Findings about a prompt, given an earlier one.

    Args:
        earlier: bytes of 4-byte tokens.
        later: likewise.
        same: equal first tokens of the two; less than either's length.
        shared: first tokens of `later` that are hits anyhow, perhaps through a third prompt.
        decode: tokens to text.
    """
    pair = _Pair(earlier, later, decode)
    runs = align(earlier, later, same, LIMIT)
    found: list[Finding] = []
    at_earlier, at = same, same
    index = 0
    while index < len(runs):
        gap = _Gap(at_earlier, runs[index].earlier, at, runs[index].later)
        ends = pair.object_ends(gap)
        if ends is not None:
            # The object as a whole is the gap: equal but for the order of its keys.
            end_earlier, end = ends
            index = _skip(runs, index, end_earlier, end)
            follows = runs[index] if index < len(runs) else None
            touching = follows is not None and follows.later - end <= _CLOSE
            stop = follows.later + follows.length if follows is not None and touching else end
            cost = _beyond(gap.start, end, shared) + (_beyond(end, stop, shared) if touching else 0)
            found.append(pair.finding(Kind.KEY_ORDER, gap, gap.start, cost))
            if follows is not None and touching:
                index += 1
                at_earlier, at = follows.earlier + follows.length, stop
            else:
                at_earlier, at = end_earlier, end
            continue
        last = _stretch_end(runs, index)
        if last > index:
            stop = runs[last].later + runs[last].length
            stretch = runs[index : last + 1]
            cost = sum(_beyond(run.later, run.later + run.length, shared) for run in stretch)
            if sum(run.length for run in stretch) >= _COVERED * (stop - gap.start):
                cost = _beyond(gap.start, stop, shared)
            found.append(pair.finding(Kind.FRAGMENT_ORDER, gap, gap.start, cost))
            at_earlier = max(run.earlier + run.length for run in stretch)
            at = stop
            index = last + 1
            continue
        run = runs[index]
        stop = run.later + run.length
        found.append(pair.judge(gap, stop, shared))
        at_earlier, at = run.earlier + run.length, stop
        index += 1
    found += pair.rest(at_earlier, at, shared)
    return [finding for finding in _merged(found) if finding.cost >= _LEAST]


def _beyond(start: int, stop: int, shared: int) -> int:
    return max(0, stop - max(start, shared))


def _skip(runs: list[Run], index: int, end_earlier: int, end: int) -> int:
    """The first run that reaches beyond an object; it is cut to begin there."""
    while index < len(runs) and runs[index].later + runs[index].length <= end:
        index += 1
    if index < len(runs) and runs[index].later < end:
        run = runs[index]
        cut = end - run.later
        if run.earlier + cut == end_earlier:
            runs[index] = Run(end_earlier, end, run.length - cut)
    return index


def _reordered(runs: list[Run], index: int) -> int:
    """The last run of the stretch, beginning with run `index`, that swaps places among its runs; or `index`.

    It ends where every later run comes later in the earlier prompt, too.
    """
    window = runs[index : index + _STRETCH]
    least_after = [0] * len(window)
    least = _BEYOND
    for at in range(len(window) - 1, -1, -1):
        least_after[at] = least
        least = min(least, window[at].earlier)
    reach = 0
    for at, run in enumerate(window):
        reach = max(reach, run.earlier + run.length)
        if least_after[at] >= reach:
            return index + at
    return index


def _stretch_end(runs: list[Run], index: int) -> int:
    """As `_reordered`, with the stretches that follow at once, and the run that goes on behind them."""
    last = _reordered(runs, index)
    if last == index:
        return index
    while last + 1 < len(runs) and runs[last + 1].later - (runs[last].later + runs[last].length) <= _CLOSE:
        following = _reordered(runs, last + 1)
        if following == last + 1:
            return following
        last = following
    return last


def _merged(found: list[Finding]) -> list[Finding]:
    """Differences in writing recur line after line: they are one finding each, at the first."""
    out: list[Finding] = []
    for finding in found:
        for at, other in enumerate(out):
            if finding.kind in (Kind.WHITESPACE, Kind.UNICODE) and other.kind is finding.kind:
                cost = other.cost + finding.cost
                out[at] = Finding(other.kind, other.position, cost, other.before, other.value)
                break
        else:
            out.append(finding)
    return out


class _Pair:
    """Two prompts and their texts around a gap."""

    def __init__(self, earlier: bytes, later: bytes, decode: Decoder) -> None:
        self._earlier = earlier
        self._later = later
        self._decode = decode

    def judge(self, gap: _Gap, end: int, shared: int) -> Finding:
        """What stands in a gap that equal tokens follow up to token `end`."""
        cost = _beyond(gap.stop, end, shared)
        length = gap.stop - gap.start
        if length > FAR and gap.earlier_stop - gap.earlier_start > FAR:
            return Finding(Kind.TEXT, gap.start, cost, "", "", far=True)
        one = self._text(self._earlier, gap.earlier_start, gap.earlier_stop)
        other = self._text(self._later, gap.start, gap.stop)
        kind = self._valued(gap)
        if kind is not None:
            # Values may end alike: what they end with is no text behind them.
            return self.finding(kind[0], gap, kind[1], _beyond(max(gap.stop, kind[2]), end, shared))
        same = equivalence(one, other)
        if same is not None:
            return self.finding(same, gap, gap.start, cost + _beyond(gap.start, gap.stop, shared))
        return self.finding(Kind.TEXT, gap, gap.start, cost)

    def finding(self, kind: Kind, gap: _Gap, position: int, cost: int) -> Finding:
        """A finding with the text around it."""
        before = self._text(self._later, max(0, position - _CONTEXT), position)
        value = self._text(self._later, position, position + min(max(gap.stop - position, 8), _CONTEXT))
        return Finding(kind, position, cost, before, value)

    def rest(self, earlier_at: int, at: int, shared: int) -> list[Finding]:
        """What follows the last run: equal but for its writing, perhaps line by line."""
        kind: Kind | None = None
        length = 0
        for reach in (_CONTEXT * 2, _OBJECT):
            one = self._text(self._earlier, earlier_at, earlier_at + reach)
            other = self._text(self._later, at, at + reach)
            kind, length = _same_writing(one, other)
            if kind is None:
                return []
        assert kind is not None  # noqa: S101 - the loop has two rounds
        end = self._token_at(at, at + _OBJECT, length)
        gap = _Gap(earlier_at, earlier_at, at, end)
        return [self.finding(kind, gap, at, _beyond(at, end, shared))]

    def object_ends(self, gap: _Gap) -> tuple[int, int] | None:
        """Token positions where a JSON object ends that has its keys in another order from the gap on."""
        low = max(0, gap.start - _OBJECT)
        low_earlier = gap.earlier_start - (gap.start - low)
        if low_earlier < 0:
            low, low_earlier = low - low_earlier, 0
        near = self._text(self._later, max(low, gap.start - _CONTEXT * 8), gap.start)
        if "{" not in near:
            return None
        before = self._text(self._later, low, gap.start)
        one = self._text(self._earlier, low_earlier, gap.earlier_start + _OBJECT)
        other = self._text(self._later, low, gap.start + _OBJECT)
        at = len(before)
        stops = reordered_object(one, at, other, at)
        if stops is None:
            return None
        reach = gap.earlier_start + _OBJECT
        end_earlier = _token_at(self._decode, self._earlier, low_earlier, reach, stops[0] - 1) + 1
        end = self._token_at(low, gap.start + _OBJECT, stops[1] - 1) + 1
        return (end_earlier, end) if end > gap.start and end_earlier > gap.earlier_start else None

    def _valued(self, gap: _Gap) -> tuple[Kind, int, int] | None:
        """The kind of value in the gap, its first token, and the token behind it."""
        low, text, start, stop = self._around(self._later, gap.start, gap.stop)
        value = value_at(text, start, stop)
        if value is None:
            return None
        if gap.earlier_stop > gap.earlier_start:
            around = self._around(self._earlier, gap.earlier_start, gap.earlier_stop)
            if value_at(*around[1:]) is None:
                return None
        high = gap.stop + _CONTEXT
        stop = self._token_at(low, high, value.stop - 1) + 1
        return value.kind, self._token_at(low, high, value.start), stop

    def _around(self, tokens: bytes, start: int, stop: int) -> tuple[int, str, int, int]:
        """First token and text of a piece of a prompt, and where in it tokens `start:stop` are."""
        low = max(0, start - _CONTEXT)
        text = self._text(tokens, low, stop + _CONTEXT)
        begin = len(self._text(tokens, low, start))
        return low, text, begin, max(begin + 1, len(self._text(tokens, low, stop)))

    def _text(self, tokens: bytes, start: int, stop: int) -> str:
        return self._decode(tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES])

    def _token_at(self, low: int, high: int, character: int) -> int:
        return _token_at(self._decode, self._later, low, high, character)


def _token_at(decode: Decoder, tokens: bytes, low: int, high: int, character: int) -> int:
    """The token that holds a character of the text of tokens `low:high`."""
    first, last = low, min(high, len(tokens) // TOKEN_BYTES)
    while first < last:
        middle = (first + last) // 2
        if len(decode(tokens[low * TOKEN_BYTES : (middle + 1) * TOKEN_BYTES])) > character:
            last = middle
        else:
            first = middle + 1
    return first


def _same_writing(one: str, other: str) -> tuple[Kind | None, int]:
    """How far two texts say the same, in characters of `other`, if they do it in different writing."""
    first, second = ("".join(text.split())[:_PEEK] for text in (one, other))
    if unicodedata.normalize("NFKD", first)[:_PEEK] != unicodedata.normalize("NFKD", second)[:_PEEK]:
        return None, 0
    plain = _walk([(c, at) for at, c in enumerate(one)], [(c, at) for at, c in enumerate(other)])
    unicode = _walk(_decomposed(one), _decomposed(other))
    kind, (mine, length) = (Kind.UNICODE, unicode) if unicode[1] > plain[1] else (Kind.WHITESPACE, plain)
    if length < _WRITTEN or one[:mine].strip() == other[:length].strip():
        return None, 0
    return kind, length


def _decomposed(text: str) -> list[tuple[str, int]]:
    return [(part, at) for at, c in enumerate(text) for part in unicodedata.normalize("NFKD", c)]


def _walk(one: list[tuple[str, int]], other: list[tuple[str, int]]) -> tuple[int, int]:
    """Characters of each up to the first difference that is not white space."""
    first = [item for item in one if not item[0].isspace()]
    second = [item for item in other if not item[0].isspace()]
    mine = length = 0
    for (a, at), (b, at_other) in zip(first, second, strict=False):
        if a != b:
            break
        mine, length = at + 1, at_other + 1
    return mine, length
