"""Requests to token ids, identical to the engine's.

One `PromptEncoder` stands for one model as one set of engines serves it: the same directory, chat template
and template arguments. It is safe to use from several threads. What it cannot render it does not guess:
`Unsupported` sends the request on by load alone.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import xxhash

from extproc.prompt.anthropic import from_messages_request
from extproc.prompt.chat import ChatInput, from_chat_request
from extproc.prompt.content_format import ContentFormat
from extproc.prompt.encoders import DEFAULT_CACHE_BYTES, Encoder, choose_encoder
from extproc.prompt.errors import Unsupported
from extproc.prompt.messages import conversation, has_media
from extproc.prompt.model_files import ModelFiles
from extproc.prompt.responses import from_responses_request
from extproc.prompt.template import ChatTemplate, Clock
from extproc.prompt.template_guard import DEFAULT_LIMITS, TemplateLimits
from extproc.prompt.tokenizer import load_tokenizer, special_tokens
from extproc.prompt.tools import tools_for_template
from extproc.prompt.truncation import Truncation
from extproc.protocol.openai import InferenceRequest, RequestKind


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of every prompt of a request, in order. One array of 4-byte integers per prompt.

    `chains` are the block hashes of each, by tokens per block, where they were asked for.
    """

    prompts: tuple["array[int]", ...]
    chains: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Tokens over all prompts."""
        return sum(map(len, self.prompts))


class PromptEncoder:
    """Encodes what one model is asked. Made by `load`.

    `encoder` says which library encodes, and why; `tokenizer_revision` changes with anything that changes
    token ids, `template_version` with the chat template and its default arguments (empty: there is none);
    `model_info` names the files used.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        content_format: ContentFormat | None,
        template_kwargs: Mapping[str, Any],
        fast: bool,
        exclude_tools_when_tool_choice_none: bool,
        clock: Clock | None,
        template_limits: TemplateLimits = DEFAULT_LIMITS,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.model_info = files
        self._tokenizer = load_tokenizer(files.model_dir, files.tokenizer_config)
        self.encoder: Encoder = choose_encoder(self._tokenizer, fast=fast, cache_bytes=cache_bytes)
        self._special = special_tokens(files.tokenizer_config)
        self._template_kwargs = dict(template_kwargs)
        self._exclude_tools = exclude_tools_when_tool_choice_none
        self.templates: dict[str, ChatTemplate] = {}
        self._template_problem: Unsupported | None = None
        try:
            self.templates = {
                name: ChatTemplate(source, content_format=content_format, clock=clock, limits=template_limits)
                for name, source in files.templates.items()
            }
        except Unsupported as problem:
            self._template_problem = problem
        self.tokenizer_revision = self._revision()
        self.template_version = self._template_version()

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        chat_template: str | Path | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        fast: Literal["auto", "off"] = "auto",
        exclude_tools_when_tool_choice_none: bool = False,
        clock: Clock | None = None,
        template_limits: TemplateLimits = DEFAULT_LIMITS,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> Self:
        """Read a model directory. The options mean what the engine's options of the same names mean.

        `chat_template` is a path, a template's text, or the name of one of the model's templates.
        `template_kwargs` are the engine's default template arguments. `clock` gives local time to templates
        that print the date; without it they are unsupported. `template_limits`: what one rendering may take.
        `cache_bytes`: memory for texts that were encoded before; 0 keeps nothing.

        Raises:
            WarmrouteError: the tokenizer files are missing or broken; the message names the file.
        """
        return cls(
            ModelFiles.read(Path(model_dir), chat_template),
            content_format=None if content_format == "auto" else content_format,
            template_kwargs=template_kwargs or {},
            fast=fast == "auto",
            exclude_tools_when_tool_choice_none=exclude_tools_when_tool_choice_none,
            clock=clock,
            template_limits=template_limits,
            cache_bytes=cache_bytes,
        )

    def encode(self, request: InferenceRequest, mark: Callable[[str], None] | None = None) -> EncodedPrompt:
        """Token ids of the request's prompts. `mark` is told when `render` is over.

        Raises:
            Unsupported: they cannot be computed here; `reason` is fit for a metric label.
        """
        if self.model_info.tokenizer_unsupported:
            raise Unsupported("renderer", self.model_info.tokenizer_unsupported)
        try:
            if request.kind is RequestKind.COMPLETION:
                prompts = self._completion(request.body)
            else:
                prompts = (self._conversation(request, mark),)
        except RecursionError:
            raise Unsupported("too-deep") from None
        if not prompts or not all(prompts):
            raise Unsupported("empty-prompt")
        return EncodedPrompt(prompts)

    def render(self, request: InferenceRequest) -> str:
        """The text a conversation is rendered to, before it is encoded: for people who look for a difference.

        Raises:
            Unsupported: as `encode`; also for completions, which are not rendered.
        """
        if request.kind is RequestKind.COMPLETION:
            raise Unsupported("not-rendered", "a completion's prompt is encoded as it is")
        return self._render(self._chat_input(request))

    # --- completions ---------------------------------------------------------------------------------

    def _completion(self, body: Mapping[str, Any]) -> tuple["array[int]", ...]:
        for key in ("prompt_embeds", "suffix"):
            if body.get(key) is not None:
                raise Unsupported(key.replace("_", "-"))
        special = body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise Unsupported("field-type", "add_special_tokens is not a boolean")
        truncation = Truncation.from_request(body)
        prompt = body.get("prompt")
        prompts = prompt if isinstance(prompt, list) and _is_batch(prompt) else [prompt]
        return tuple(self._one_completion(one, special, truncation) for one in prompts)

    def _one_completion(
        self, prompt: Any, add_special_tokens: bool, truncation: Truncation | None
    ) -> "array[int]":
        if isinstance(prompt, str):
            return self._encode_text(prompt, add_special_tokens, truncation)
        # A boolean is an integer to Python; the engine's answer to one is not worth imitating.
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise Unsupported("prompt-shape", "neither text nor token ids")
        try:
            ids = array("I", prompt)
        except OverflowError:
            raise Unsupported("prompt-shape", "not token ids") from None
        return ids if truncation is None else truncation.cut(ids)

    def _encode_text(
        self, text: str, add_special_tokens: bool, truncation: Truncation | None
    ) -> "array[int]":
        if truncation is not None:
            return truncation.encode(self._tokenizer, text, add_special_tokens=add_special_tokens)
        return self.encoder.encode(text, add_special_tokens=add_special_tokens)

    # --- conversations -------------------------------------------------------------------------------

    def _conversation(self, request: InferenceRequest, mark: Callable[[str], None] | None) -> "array[int]":
        reused = _forwarded_ids(request)
        if reused is not None:
            return reused
        chat = self._chat_input(request)
        # Only these two endpoints have the field, and a Responses body means another thing by `truncation`.
        truncation = Truncation.from_request(request.body) if request.kind is RequestKind.CHAT else None
        text = self._render(chat)
        if mark is not None:
            mark("render")
        return self._encode_text(text, chat.add_special_tokens, truncation)

    @property
    def chat_problem(self) -> str | None:
        """Why no conversation can be rendered here, whatever is in it; None: it can."""
        if self.model_info.chat_unsupported:
            return f"renderer: {self.model_info.chat_unsupported}"
        try:
            self._template(tools=False)
        except Unsupported as problem:
            return str(problem)
        return None

    def _chat_input(self, request: InferenceRequest) -> ChatInput:
        if self.model_info.chat_unsupported:
            raise Unsupported("renderer", self.model_info.chat_unsupported)
        body = request.body
        if request.kind is RequestKind.MESSAGES:
            return from_messages_request(
                body,
                with_tools=not self._drops_tools(_kind_of(body.get("tool_choice"))),
                merge_systems=self._merges_systems,
                disabled_effort=lambda: self._disabled_effort,
            )
        with_tools = not self._drops_tools(body.get("tool_choice"))
        if request.kind is RequestKind.RESPONSES:
            return from_responses_request(body, with_tools=with_tools)
        tools = body.get("tools")
        if tools is not None and not (isinstance(tools, list) and tools):
            raise Unsupported("tool-shape", "tools is not a list with something in it")
        return from_chat_request(body, tools_for_template(tools) if tools and with_tools else None)

    def _drops_tools(self, choice: object) -> bool:
        return self._exclude_tools and choice == "none"

    def _template(self, *, tools: bool) -> ChatTemplate:
        if self._template_problem is not None:
            raise self._template_problem
        template = self.templates.get("tool_use") if tools else None
        template = template or self.templates.get("default")
        if template is None:
            raise Unsupported("no-chat-template")
        return template

    def _render(self, chat: ChatInput) -> str:
        template = self._template(tools=chat.tools is not None)
        variables = {**self._template_kwargs, **chat.variables}
        return template.render(
            conversation(chat.messages, template.content_format, chat.function_keys),
            tools=chat.tools,
            documents=chat.documents,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables={
                **self._special,
                **{key: value for key, value in variables.items() if key in template.variables},
            },
        )

    @cached_property
    def _merges_systems(self) -> bool:
        return any(self._template(tools=tools).needs_leading_system() for tools in (False, True))

    @cached_property
    def _disabled_effort(self) -> str:
        """What "thinking disabled" becomes: `none`, unless the template ignores or refuses that."""
        prompts: dict[str, str | None] = {}
        for effort in ("none", "low", "medium", "high", "xhigh", "max"):
            body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
            try:
                prompts[effort] = self._render(from_chat_request(body, None))
            except Unsupported:
                prompts[effort] = None
        quiet = prompts.pop("none")
        return "low" if quiet is None or quiet in prompts.values() else "none"

    # --- identity ------------------------------------------------------------------------------------

    def _template_version(self) -> str:
        templates = sorted(self.model_info.templates.items())
        if not templates:
            return ""
        return xxhash.xxh3_64_hexdigest(repr((templates, sorted(self._template_kwargs.items()))).encode())

    def _revision(self) -> str:
        digest = xxhash.xxh3_64(self._tokenizer.to_str().encode())
        for name, source in sorted(self.model_info.templates.items()):
            digest.update(f"\0{name}\0{source}".encode())
        return digest.hexdigest()


def _kind_of(tool_choice: object) -> object:
    if tool_choice is None:
        return None
    if not isinstance(tool_choice, dict):
        raise Unsupported("field-type", "tool_choice is not an object")
    return tool_choice.get("type")


def _is_batch(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], str | list)


def _forwarded_ids(request: InferenceRequest) -> "array[int] | None":
    """Ids that an earlier stage has already computed; the engine then renders nothing."""
    params = request.body.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if ids is None or request.body.get("echo"):
        return None
    messages = request.body.get("messages")
    if isinstance(messages, list) and has_media(messages):
        return None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise Unsupported("prompt-shape", "kv_transfer_params.prompt_token_ids")
    try:
        return array("I", ids)
    except OverflowError:
        raise Unsupported("prompt-shape", "kv_transfer_params.prompt_token_ids") from None
