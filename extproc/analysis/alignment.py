"""What two token sequences have in common after they part: runs of equal tokens, perhaps moved.

From the first difference on, the later prompt is read from left to right. Wherever its next tokens stand in
the earlier one too, the longest run from there is taken: the nearest place ahead if there is one, else any
place no run was taken from yet, if the run is long enough not to be chance. What lies between two runs is a
gap. A run that begins before the end of an earlier run (in the earlier prompt) was moved.
"""

from dataclasses import dataclass

from extproc.analysis.prefix_tree import TOKEN_BYTES, common_bytes

GRAM = 4  # tokens that must agree to try a place
NEAR = 192  # tokens within which a run ahead counts as "the text goes on"
MIN_RUN = 8  # tokens of a run that goes on
MIN_MOVED = 24  # tokens of a run taken from elsewhere
_PLACES = 8  # places tried for one gram


@dataclass(frozen=True, slots=True)
class Run:
    """`length` equal tokens, at `earlier` of the earlier prompt and at `later` of the later one."""

    earlier: int
    later: int
    length: int


def align(earlier: bytes, later: bytes, start: int, limit: int) -> list[Run]:
    """Runs of the later prompt after token `start`, where the two part, in its order.

    Args:
        earlier: bytes of 4-byte tokens.
        later: likewise.
        start: number of first tokens that are equal.
        limit: tokens after `start` to look at, of each.
    """
    places = _grams(earlier, start, limit)
    stop = min(len(later) // TOKEN_BYTES, start + limit)
    runs: list[Run] = []
    expected = at_end = at = start
    while at <= stop - GRAM:
        found = places.get(later[at * TOKEN_BYTES : (at + GRAM) * TOKEN_BYTES])
        run = None if found is None else _best(earlier, later, found, expected, at, stop, runs)
        if run is None:
            at += 1
            continue
        run = _reach_back(earlier, later, run, at_end, runs)
        runs.append(run)
        at = at_end = run.later + run.length
        expected = run.earlier + run.length
    return runs


def _grams(tokens: bytes, start: int, limit: int) -> dict[bytes, list[int]]:
    places: dict[bytes, list[int]] = {}
    stop = min(len(tokens) // TOKEN_BYTES, start + limit)
    for at in range(start, stop - GRAM + 1):
        gram = tokens[at * TOKEN_BYTES : (at + GRAM) * TOKEN_BYTES]
        found = places.get(gram)
        if found is None:
            places[gram] = [at]
        elif len(found) < 64:
            found.append(at)
    return places


def _best(
    earlier: bytes, later: bytes, places: list[int], expected: int, at: int, stop: int, taken: list[Run]
) -> Run | None:
    ahead = [place for place in places if expected <= place <= expected + NEAR]
    for place in ahead[:_PLACES]:
        length = _equal(earlier, later, place, at, stop)
        if length >= MIN_RUN:
            return Run(place, at, length)
    best: Run | None = None
    free = [place for place in places if not any(0 <= place - run.earlier < run.length for run in taken)]
    for place in free[:_PLACES]:
        length = _equal(earlier, later, place, at, stop)
        if length >= MIN_MOVED and (best is None or length > best.length):
            best = Run(place, at, length)
    return best


def _equal(earlier: bytes, later: bytes, place: int, at: int, stop: int) -> int:
    room = (stop - at) * TOKEN_BYTES
    one = earlier[place * TOKEN_BYTES : place * TOKEN_BYTES + room]
    return common_bytes(one, later[at * TOKEN_BYTES : at * TOKEN_BYTES + len(one)]) // TOKEN_BYTES


def _reach_back(earlier: bytes, later: bytes, run: Run, low: int, taken: list[Run]) -> Run:
    """The run with the equal tokens right before it that no gram found, down to token `low`."""
    back = 0
    while run.later - back > low and run.earlier - back > 0:
        place = run.earlier - back - 1
        one, other = place * TOKEN_BYTES, (run.later - back - 1) * TOKEN_BYTES
        if earlier[one : one + TOKEN_BYTES] != later[other : other + TOKEN_BYTES]:
            break
        if any(0 <= place - other_run.earlier < other_run.length for other_run in taken):
            break
        back += 1
    return Run(run.earlier - back, run.later - back, run.length + back)
