"""A chat template, rendered as the engine renders it: jinja2 in a sandbox, with transformers' additions.

Transformers adds loop controls, `{% generation %}` blocks, a `tojson` that does not escape HTML and keeps the
order of keys, `raise_exception` and `strftime_now`. The last reads a clock, so the caller supplies one.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime

from extproc.prompt.content_format import ContentFormat, detect_content_format
from extproc.prompt.errors import Unsupported
from extproc.prompt.template_guard import (
    DEFAULT_LIMITS,
    GuardedEnvironment,
    TemplateLimitError,
    TemplateLimits,
)

Clock = Callable[[], datetime]
Message = dict[str, Any]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; rendering just passes it through."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _bare_environment(limits: TemplateLimits = DEFAULT_LIMITS) -> GuardedEnvironment:
    return GuardedEnvironment(extensions=[_GenerationBlocks, jinja2.ext.loopcontrols], limits=limits)


def _environment(clock: Clock | None, limits: TemplateLimits) -> GuardedEnvironment:
    def strftime_now(pattern: str) -> str:
        if clock is None:
            raise Unsupported("template-clock", "the template prints the date and no clock was given")
        return clock().strftime(pattern)

    @jinja2.pass_context
    def tojson(
        context: jinja2.runtime.Context,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        # Each line of a deep value costs its depth, in time and in characters.
        return environment.written(context, encoder.iterencode(value))

    environment = _bare_environment(limits)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


class ChatTemplate:
    """One compiled template. `variables` are the names it takes from outside.

    `content_format` says how it wants message content; `volatile` that it may print the date. `limits`: what
    one rendering may take.
    """

    def __init__(
        self,
        source: str,
        *,
        content_format: ContentFormat | None = None,
        clock: Clock | None = None,
        limits: TemplateLimits = DEFAULT_LIMITS,
    ) -> None:
        try:
            # Parsed without the additions, as the engine does: so they count as variables.
            tree = _bare_environment().parse(source)
            self._environment = _environment(clock, limits)
            self._compiled = self._environment.guarded(source)
        except jinja2.TemplateError as error:
            raise Unsupported("template-syntax", str(error)) from None
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.content_format = content_format or detect_content_format(tree)
        self.volatile = "strftime_now" in self.variables
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text.

        Raises:
            Unsupported: the template refused the messages or failed on them (the engine then answers 400).
        """
        conversation = list(messages)
        if not self._knows_developer and any(message["role"] == "developer" for message in conversation):
            conversation = _merge_systems(_developer_to_system(conversation))
        last_text: str | None = None
        if continue_final_message:
            if add_generation_prompt:
                raise Unsupported("template-error", "cannot continue a message and start another")
            conversation, last_text = _tag_last(conversation)
        try:
            text = self._compiled.render(
                messages=conversation,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **variables,
                **self._environment.budget(),
            )
        except Unsupported:
            raise
        except RecursionError:
            raise Unsupported("too-deep") from None
        except TemplateLimitError as error:
            raise Unsupported("template-limit", str(error)) from None
        except Exception as error:
            raise Unsupported("template-error", str(error)[:200]) from None
        return text if last_text is None else self._cut_at_tag(text, last_text)

    def _cut_at_tag(self, text: str, last_text: str) -> str:
        tag = _CONTINUE_TAG.strip()
        if "content" not in self.source or tag not in text or last_text.strip() not in text:
            raise Unsupported("template-error", "the template does not print the message to continue")
        at = text.rindex(tag)
        if text.startswith(_CONTINUE_TAG, at):
            return text[:at]
        return text[:at].rstrip()  # the template trims messages

    def needs_leading_system(self) -> bool:
        """Whether the engine merges later system messages of `/v1/messages` into the first.

        It finds out by rendering a probe in an environment that lacks transformers' additions, so a template
        that merely calls `raise_exception` or `strftime_now` on the way counts as one that refuses.
        """
        environment = GuardedEnvironment(extensions=[jinja2.ext.loopcontrols])
        probe = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            compiled = environment.guarded(self.source)
            compiled.render(messages=probe, add_generation_prompt=False, **environment.budget())
        except jinja2.TemplateError:
            return True
        return False


def _developer_to_system(messages: Sequence[Message]) -> list[Message]:
    return [
        {key: value for key, value in {**message, "role": "system"}.items() if key != "tools"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]


def _merge_systems(messages: list[Message]) -> list[Message]:
    """One system message in front, if there are several or the one is elsewhere."""
    at = [index for index, message in enumerate(messages) if message["role"] == "system"]
    # A first system message without content does not count as one before the next: the engine's rule.
    seen = False
    needed = False
    texts: list[str] = []
    for index in at:
        needed = needed or index > 0 or seen
        text = _joined_text(messages[index].get("content", ""))
        if text:
            seen = True
            texts.append(text)
    if not needed:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _joined_text(content: Any) -> str:
    if not isinstance(content, list):
        return str(content) if content else ""
    return "\n".join(part["text"] for part in content if "text" in part)


def _tag_last(messages: list[Message]) -> tuple[list[Message], str]:
    """Mark the end of the last message's text, to cut the rendered prompt there."""
    if not messages:
        raise Unsupported("template-error", "no message to continue")
    last = copy.deepcopy(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_TAG
        return [*messages[:-1], last], content
    for part in reversed(content or []):
        if "text" in part:
            text: str = part["text"]
            part["text"] = text + _CONTINUE_TAG
            return [*messages[:-1], last], text
    raise Unsupported("template-error", "the final message has no text to continue")
