"""What a request says about being held: how important it is, and how long its client waits.

A hint is never a reason to refuse a request: one that cannot be read says nothing.
"""

from collections.abc import Iterable, Mapping

MOST_PRIORITY = 100
"""Priorities are within this, to both sides of 0."""


def priority_of(headers: Mapping[str, str], header: str | None, body: int | None, most: int | None) -> int:
    """The priority of a request; a higher one goes first.

    Args:
        headers: by lower-case name.
        header: the one that names a priority; None: none does.
        body: what the body asks for; the header counts for more.
        most: what it may ask for at most, and has where it asks for nothing; None: anything, and 0.
    """
    asked = None if header is None else _whole(headers.get(header))
    if asked is None:
        asked = body
    if asked is None:
        asked = most or 0
    if most is not None:
        asked = min(asked, most)
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, asked))


def body_priority(body: Mapping[str, object]) -> int | None:
    """The `priority` of a body as vLLM means it, where lower goes first, with its sign turned."""
    value = body.get("priority")
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return -value


def timeout_ms(headers: Mapping[str, str], names: Iterable[str]) -> int | None:
    """Milliseconds the client waits, as the first of these headers says; None: none says."""
    said = (_whole(headers.get(name)) for name in names)
    return next((value for value in said if value is not None and value > 0), None)


def _whole(text: str | None) -> int | None:
    if text is None or len(text) > 16:
        return None
    try:
        return int(text.strip())
    except ValueError:
        return None
