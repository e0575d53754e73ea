"""What the doctor reports."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check came out. Only `FAIL` makes the command fail."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result: what was looked at, how it is, and what to do about it."""

    subject: str
    check: str
    status: Status
    detail: str
    advice: str = ""
