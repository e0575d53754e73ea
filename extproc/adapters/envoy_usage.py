"""Native Envoy filters that lift `usage` out of responses into `llm.usage` metadata.

No response byte passes through Python for this. Both filters read the same paths, so a usage looks the
same whether the answer was streamed or not; a later event of a stream overwrites an earlier one.
"""

from betterproto2 import Message
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.content_parsers.json import v3 as json_parser
from envoy_data_plane.envoy.extensions.filters.http.json_to_metadata import v3 as json_to_metadata
from envoy_data_plane.envoy.extensions.filters.http.sse_to_metadata import v3 as sse_to_metadata
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any

from extproc.protocol.access_log import USAGE_NAMESPACE

SSE = "envoy.filters.http.sse_to_metadata"
JSON = "envoy.filters.http.json_to_metadata"
Rules = dict[tuple[str, ...], str]
MAX_EVENT_SIZE = 1 << 20  # the last event of a streamed Responses answer repeats the whole text

_OPENAI = {
    ("prompt_tokens",): "prompt_tokens",
    ("completion_tokens",): "completion_tokens",
    ("prompt_tokens_details", "cached_tokens"): "cached_tokens",
}
_RESPONSES = {
    ("input_tokens",): "input_tokens",
    ("output_tokens",): "output_tokens",
    ("input_tokens_details", "cached_tokens"): "input_cached_tokens",
}
_ANTHROPIC = {
    ("input_tokens",): "input_tokens",
    ("output_tokens",): "output_tokens",
    ("cache_read_input_tokens",): "cache_read_input_tokens",
    ("cache_creation_input_tokens",): "cache_creation_input_tokens",
}
_PLAIN: Rules = {("usage", *path): key for path, key in (_OPENAI | _RESPONSES | _ANTHROPIC).items()}
# Streamed, the Responses API puts usage into `response`, Anthropic's message_start into `message`.
_STREAMED: Rules = (
    _PLAIN
    | {("response", "usage", *path): key for path, key in _RESPONSES.items()}
    | {("message", "usage", *path): key for path, key in _ANTHROPIC.items()}
)


def filter_names(envoy_version: tuple[int, int], *, streamed: bool) -> tuple[str, ...]:
    """Names of the filters, in order; that of streamed answers if wanted and known to this Envoy."""
    return (SSE, JSON) if streamed and envoy_version >= (1, 38) else (JSON,)


def filters(envoy_version: tuple[int, int], *, streamed: bool) -> list[tuple[str, Message]]:
    """The filters by name, in order."""
    messages: dict[str, Message] = {SSE: _sse(), JSON: _json()}
    return [(name, messages[name]) for name in filter_names(envoy_version, streamed=streamed)]


def _rules(paths: Rules) -> list[json_to_metadata.JsonToMetadataRule]:
    return [
        json_to_metadata.JsonToMetadataRule(
            selectors=[json_to_metadata.JsonToMetadataSelector(key=name) for name in path],
            on_present=json_to_metadata.JsonToMetadataKeyValuePair(
                metadata_namespace=USAGE_NAMESPACE,
                key=key,
                type=json_to_metadata.JsonToMetadataValueType.NUMBER,
            ),
        )
        for path, key in paths.items()
    ]


def _json() -> json_to_metadata.JsonToMetadata:
    return json_to_metadata.JsonToMetadata(
        response_rules=json_to_metadata.JsonToMetadataMatchRules(
            rules=_rules(_PLAIN),
            allow_content_types_regex=matcher.RegexMatcher(regex="application/json(;.*)?"),
        )
    )


def _sse() -> sse_to_metadata.SseToMetadata:
    return sse_to_metadata.SseToMetadata(
        response_rules=sse_to_metadata.SseToMetadataProcessingRules(
            content_parser=core.TypedExtensionConfig(
                name="envoy.content_parsers.json",
                typed_config=Any.pack(
                    json_parser.JsonContentParser(
                        rules=[
                            json_parser.JsonContentParserRuleConfig(rule=rule) for rule in _rules(_STREAMED)
                        ]
                    )
                ),
            ),
            max_event_size=MAX_EVENT_SIZE,
        )
    )
