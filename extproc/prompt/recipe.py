"""How an encoder is made: what another process must know to encode exactly as this one does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.encoders import DEFAULT_CACHE_BYTES
from extproc.prompt.template_guard import DEFAULT_LIMITS, TemplateLimits


class Identity(NamedTuple):
    """What tells encoders apart that give other ids: see `PromptEncoder`."""

    tokenizer_revision: str
    template_version: str


@dataclass(frozen=True)
class EncoderRecipe:
    """The arguments of `PromptEncoder.load`, which say what they mean; all of them can be sent.

    Attributes:
        local_time: templates that print the date get that of this machine; else they are unsupported.
    """

    model_dir: str
    chat_template: str | Path | None = None
    content_format: Literal["auto", "string", "openai"] = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    fast: Literal["auto", "off"] = "auto"
    exclude_tools_when_tool_choice_none: bool = False
    local_time: bool = True
    template_limits: TemplateLimits = DEFAULT_LIMITS
    cache_bytes: int = DEFAULT_CACHE_BYTES

    def load(self, *, of: int = 1) -> PromptEncoder:
        """The encoder, with its part of the memory where `of` of them do the work together.

        Raises:
            WarmrouteError: the model's files are missing or broken.
        """
        return PromptEncoder.load(
            self.model_dir,
            chat_template=self.chat_template,
            content_format=self.content_format,
            template_kwargs=self.template_kwargs,
            fast=self.fast,
            exclude_tools_when_tool_choice_none=self.exclude_tools_when_tool_choice_none,
            clock=datetime.now if self.local_time else None,
            template_limits=self.template_limits,
            cache_bytes=self.cache_bytes // of,
        )


def identity_of(encoder: PromptEncoder) -> Identity:
    """What an encoder's ids depend on."""
    return Identity(encoder.tokenizer_revision, encoder.template_version)
