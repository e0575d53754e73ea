"""Normalization of prompts: what is made equal, and whether it is."""

from typing import Annotated

from pydantic import AfterValidator, Field

from extproc.config.base import Section
from extproc.prompt.normalize import NormalizationMode, NormalizationRules
from extproc.prompt.normalize_text import TextRules
from extproc.prompt.normalize_volatile import STABLE_END


def _one_line(text: str) -> str:
    stripped = text.strip()
    if not stripped or "\n" in stripped or "\r" in stripped:
        raise ValueError("must be some text on one line")
    return stripped


Line = Annotated[str, AfterValidator(_one_line)]


class Normalization(Section):
    """Prompts that mean the same are made the same tokens, before they are routed and in what goes on."""

    mode: NormalizationMode = Field(
        NormalizationMode.DISABLED, description="disabled, dry-run (only reports) or apply"
    )
    line_ends: bool = Field(default=True, description="CRLF and CR become LF")
    unicode: bool = Field(default=True, description="canonical composition (NFC)")
    trailing_spaces: bool = Field(default=True, description="blanks at ends of lines go")
    tool_key_order: bool = Field(default=True, description="keys of tool definitions are sorted")
    fragment_tag: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$")] | None = Field(
        None, description="fragments in this tag, `<tag>…</tag>`, are sorted; null: they keep their order"
    )
    volatile_lines: list[Line] = Field(
        default_factory=list, description="header lines that begin so go behind the stable part"
    )
    stable_end: Line = Field(
        STABLE_END, description="line that ends the stable part; without it the text's end"
    )
    max_body_bytes: Annotated[int, Field(gt=0)] = Field(8 << 20, description="larger bodies are let be")

    def rules(self) -> NormalizationRules:
        """The rules without the mode."""
        return NormalizationRules(
            TextRules(
                line_ends=self.line_ends,
                unicode=self.unicode,
                trailing_spaces=self.trailing_spaces,
                fragment_tag=self.fragment_tag,
                volatile_lines=tuple(self.volatile_lines),
                stable_end=self.stable_end,
            ),
            tool_key_order=self.tool_key_order,
            max_body_bytes=self.max_body_bytes,
        )
