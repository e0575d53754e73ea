"""Why predictions for a worker keep failing: the likely cause, from what its audits have in common.

    engine counts other prompt tokens than we do                       tokenizer (or template) differs
    hits end inside a block of ours                                    block size differs
    more is found than predicted, and no events came                   events missing
    more is found than predicted, although events come                 adapter or salt, where there is one;
                                                                       else the tokenizer
    less is found: only with an adapter or salt, others are fine       adapter or salt
    less is found: never anything at all                               tokenizer
    less is found: hits break off at the same place every time         hidden variable field
    less is found: now this much, now that                             evicted before its turn

The first that fits is told, once `MANY` audits show it.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from extproc.core.namespace import Namespace

MANY = 8
_LOW = 0.5
_MOST = 0.8
_CHECK = "run `warmroute check`"


class Audit(NamedTuple):
    """One finished request: tokens predicted and really found in the cache.

    `counted` are its prompt tokens as we count them, `reported` as the engine does; None: it did not say.
    """

    at: float
    predicted: int
    actual: int
    namespace: Namespace
    block_size: int
    counted: int
    reported: int | None


class Cause(StrEnum):
    """What is likely to be wrong. Used in the log and in metrics."""

    TOKENIZER = "tokenizer-differs"
    BLOCK_SIZE = "block-size-differs"
    EVENTS_MISSING = "events-missing"
    NAMESPACE = "adapter-or-salt-differs"
    VARIABLE_FIELD = "hidden-variable-field"
    EVICTED = "evicted-early"


class Complaint(NamedTuple):
    """A cause, and what to tell whoever can mend it."""

    cause: Cause
    message: str


def believable(audits: Sequence[Audit]) -> float:
    """Share of what was predicted that was found, 0 to 1; 1 where nothing was predicted."""
    predicted = sum(audit.predicted for audit in audits)
    return sum(min(audit.actual, audit.predicted) for audit in audits) / predicted if predicted else 1.0


def diagnose(audits: Sequence[Audit], *, events: bool) -> Complaint | None:
    """What is wrong with a worker of which these are the last audits; None: nothing that lasts.

    Args:
        audits: of one worker.
        events: whether KV events of it arrive.
    """
    if len(audits) < MANY:
        return None
    miscounted = [a for a in audits if a.reported is not None and a.reported != a.counted]
    if len(miscounted) * 2 > len(audits):
        last = miscounted[-1]
        return Complaint(
            Cause.TOKENIZER,
            f"the engine counts other prompt tokens ({last.reported} where {last.counted} were expected): "
            f"its tokenizer or chat template differs; {_CHECK}",
        )
    hits = [a for a in audits if a.actual > 0]
    if len(hits) >= MANY // 2 and sum(a.actual % a.block_size != 0 for a in hits) * 2 > len(hits):
        return Complaint(
            Cause.BLOCK_SIZE,
            f"the engine's hits ({hits[-1].actual} tokens) do not end with blocks of {hits[-1].block_size} "
            f"tokens: its block size differs from what its metrics or the pool's `block_size` say; {_CHECK}",
        )
    if sum(a.actual > a.predicted for a in audits) * 2 > len(audits):
        return _found_more(audits, events=events)
    claimed = [a for a in audits if a.predicted > 0]
    if len(claimed) >= MANY and believable(claimed) < _LOW:
        return _found_less(claimed)
    return None


def _found_more(audits: Sequence[Audit], *, events: bool) -> Complaint:
    if not events:
        return Complaint(
            Cause.EVENTS_MISSING,
            "the engine finds prefixes that were not predicted, and its KV events are missing: check its "
            f"--kv-events-config and the pool's `kv_events`; {_CHECK}",
        )
    if all(_is_special(a.namespace) for a in audits if a.actual > a.predicted):
        return Complaint(Cause.NAMESPACE, _OTHER_KEYS)
    return Complaint(
        Cause.TOKENIZER,
        "the engine finds prefixes that were not predicted: its KV events describe other token ids than the "
        f"requests, so its tokenizer or chat template differs; {_CHECK}",
    )


def _found_less(claimed: Sequence[Audit]) -> Complaint:
    failing = [a for a in claimed if a.actual < a.predicted]
    fine = [a for a in claimed if not _is_special(a.namespace)]
    special = all(_is_special(a.namespace) for a in failing)
    if special and (believable(fine) >= _MOST or not any(a.actual for a in failing)):
        return Complaint(Cause.NAMESPACE, _OTHER_KEYS)
    if not any(a.actual for a in claimed):
        return Complaint(
            Cause.TOKENIZER,
            "predicted hits never happen, from the first block on: the tokenizer or chat template may differ "
            f"from the engine's, or something at the very beginning of the prompts varies; {_CHECK}",
        )
    ((stop, times),) = Counter(a.actual for a in failing).most_common(1)
    beyond = any(a.actual > stop for a in claimed)
    if stop and not beyond and times >= _MOST * len(failing):
        return Complaint(
            Cause.VARIABLE_FIELD,
            f"hits break off after {stop} tokens in every prompt: something there varies between this "
            f"router's rendering and the engine's (a time, an id); look at the template; {_CHECK}",
        )
    return Complaint(
        Cause.EVICTED,
        "predicted hits are gone when their requests are served: the engine's cache is too small for its "
        "load, or its KV events come late",
    )


def _is_special(namespace: Namespace) -> bool:
    return bool(namespace.adapter or namespace.cache_salt)


_OTHER_KEYS = (
    "requests with an adapter or a cache salt are not predicted, others are: the engine knows the adapter "
    f"under another name, or the salt is not what it gets; {_CHECK}"
)
