"""Fields of `multipart/form-data` bodies, as uploads of audio are: short ones, and only looked for."""

import re

MOST_PARTS = 64
"""What comes behind so many parts is not looked at."""
_MOST_HEADER_BYTES = 4096
_MOST_VALUE_BYTES = 1024

_TYPE = re.compile(r"multipart/form-data\s*;(.*)", re.IGNORECASE | re.DOTALL)
_BOUNDARY = re.compile(r'(?:^|;)\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(
    rb'(?:^|\r\n)content-disposition:\s*form-data\s*;(?:[^\r\n]*;)?\s*name=(?:"([^"\r\n]*)"|([^\s;"]+))',
    re.IGNORECASE,
)


def form_field(content_type: str, body: bytes, name: str) -> str | None:
    """The text of the first field called `name`; None where there is none, or the body is no such form."""
    kind = _TYPE.match(content_type.strip())
    boundary = None if kind is None else _BOUNDARY.search(kind[1])
    if boundary is None:
        return None
    between = b"\r\n--" + (boundary[1] or boundary[2]).encode("latin-1", "replace")
    # The first delimiter needs no line end before it.
    at = len(between) - 2 if body.startswith(between[2:]) else _behind(body, between, 0)
    for _ in range(MOST_PARTS):
        if at < 0 or body.startswith(b"--", at):
            return None
        head_end = body.find(b"\r\n\r\n", at, at + _MOST_HEADER_BYTES)
        found = None if head_end < 0 else _NAME.search(body, at, head_end)
        if found is not None and (found[1] or found[2] or b"") == name.encode():
            end = body.find(between, head_end + 2, head_end + 4 + _MOST_VALUE_BYTES)
            return None if end < 0 else body[head_end + 4 : end].decode("utf-8", "replace")
        at = _behind(body, between, at)
    return None


def _behind(body: bytes, mark: bytes, start: int) -> int:
    at = body.find(mark, start)
    return at if at < 0 else at + len(mark)
