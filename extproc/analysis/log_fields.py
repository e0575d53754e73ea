"""What a log line says about a request besides its prompt: when, whose, of which session and class."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

_TIME = (
    *("time", "timestamp", "@timestamp", "ts", "startTime", "start_time", "created", "created_at"),
    *("request_time", "date", "datetime"),
)
_TENANT = (
    *("tenant", "tenant_id", "tenantId", "user_api_key_team_alias", "user_api_key_team_id", "team_id"),
    *("team", "organization", "organization_id", "org_id", "user_api_key_alias"),
)
_SESSION = ("session", "session_id", "sessionId", "conversation_id", "litellm_session_id", "thread_id")
_CLASS = ("class", "prefix_class", "traffic_class", "use_case")
_TEMPLATE = ("template", "template_id", "prompt_template", "prompt_version", "prompt_id")
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "tenant": ("x-tenant-id", "x-tenant", "x-warmroute-tenant"),
    "session": ("x-session-id",),
    "class": ("x-warmroute-class", "x-prefix-class"),
    "template": ("x-prompt-template",),
    "time": (),
}
_LONGEST = 120
_NUMBER = re.compile(r"[\d.]+")


@dataclass(frozen=True, slots=True)
class Fields:
    """`time` in seconds since 1970; each None where the line does not say."""

    time: float | None = None
    tenant: str | None = None
    session: str | None = None
    traffic_class: str | None = None
    template: str | None = None


def read_fields(levels: Sequence[Mapping[str, Any]], custom: Mapping[str, str]) -> Fields:
    """Fields of a request.

    Args:
        levels: objects from the line's outermost to the body.
        custom: see `read_line`.
    """
    places = [*levels, *(level["metadata"] for level in levels if isinstance(level.get("metadata"), dict))]
    headers = [named for level in levels if (named := header_map(level))]

    def find(name: str, keys: Sequence[str]) -> Any:
        if name in custom:
            return next((v for level in levels if (v := _dotted(level, custom[name])) is not None), None)
        for named in headers:
            for key in _HEADERS[name]:
                if named.get(key):
                    return named[key]
        for key in keys:
            for place in places:
                value = place.get(key)
                if isinstance(value, str | int | float) and value not in ("", "-"):
                    return value
        return None

    session = find("session", _SESSION)
    if session is None and levels:
        session = levels[-1].get("prompt_cache_key")
    return Fields(
        parse_time(find("time", _TIME)),
        _text(find("tenant", _TENANT)),
        _text(session),
        _text(find("class", _CLASS)),
        _text(find("template", _TEMPLATE)),
    )


def header_map(level: Mapping[str, Any]) -> dict[str, str]:
    """Headers in an object, by lower-case name: a mapping, or a list of key and value (Envoy's tap)."""
    for key in ("headers", "request_headers", "requestHeaders"):
        value = level.get(key)
        if isinstance(value, dict):
            return {str(name).lower(): str(item) for name, item in value.items()}
        if isinstance(value, list):
            return {
                str(item["key"]).lower(): str(item["value"])
                for item in value
                if isinstance(item, dict) and "key" in item and "value" in item
            }
    return {}


def parse_time(value: Any) -> float | None:
    """Seconds since 1970 from seconds, ms, µs or ns, or from ISO 8601 text."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, int | float):
        seconds = float(value)
        while seconds > 1e11:  # later than the year 5000: a smaller unit
            seconds /= 1000.0
        return seconds
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _dotted(level: Mapping[str, Any], path: str) -> Any:
    value: Any = level
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = next((item for name, item in value.items() if str(name).lower() == part.lower()), None)
    return value


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, dict | list):
        return None
    return str(value)[:_LONGEST] or None
