"""Names that clients make up, fit to be logged and shown."""

import re

LONGEST = 256
"""Characters; no model, tenant or request id that anybody configures is longer."""

# A terminal obeys these, and a log may be read in one.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def shown(name: str) -> str:
    """`name`, cut, and with a question mark for each control character and lone surrogate."""
    if len(name) > LONGEST:
        name = name[:LONGEST]
    if name.isprintable():  # most are; surrogates are not
        return name
    return _CONTROL.sub("?", name).encode("utf-8", "replace").decode()
