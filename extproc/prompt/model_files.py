"""The files of a model directory that decide its token ids, found the way the engine finds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from extproc.core.errors import WarmrouteError
from extproc.prompt.tokenizer import read_json

# Models whose conversations the engine renders with code instead of a chat template.
_OWN_RENDERERS = {
    "DeepseekV32ForCausalLM": "DeepSeek V3.2",
    "DeepseekV41ForCausalLM": "DeepSeek V4.1",
    "DeepseekV4ForCausalLM": "DeepSeek V4",
    "DeepseekV4ForConditionalGeneration": "DeepSeek V4",
    "GptOssForCausalLM": "harmony",
    "InklingForCausalLM": "Inkling",
    "InklingForConditionalGeneration": "Inkling",
    "KimiK3ForConditionalGeneration": "Kimi K3",
}
# Models whose tokenizer is not `tokenizer.json` at all.
_OWN_TOKENIZERS = {"MoonshotKimiaForCausalLM": "Kimi Audio"}
# Model types for which the engine brings a template when the model has none.
_FALLBACK_TEMPLATES = frozenset(
    {
        "blip-2",
        "clip",
        "colpali",
        "deepseek_ocr",
        "deepseek_ocr2",
        "deepseek_vl_v2",
        "minicpmv",
        "minicpmv4_6",
        "minicpmv4_7",
        "paligemma",
        "siglip",
        "siglip2",
        "unlimited-ocr",
        "unlimited_ocr",
    }
)

# Parts that a model's configuration describes if there is more to it than text.
_MULTIMODAL_KEYS = frozenset({"audio_config", "thinker_config", "vision_config", "vision_tower_config"})


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What was read from where.

    `templates` are chat templates by name: `default`, and perhaps `tool_use`, which renders what has tools.
    `template_origin` names the file or option they came from. `chat_unsupported` and `tokenizer_unsupported`
    say why conversations, or all requests, cannot be encoded here.
    """

    model_dir: Path
    tokenizer_config: Mapping[str, Any]
    templates: Mapping[str, str]
    template_origin: str | None
    model_type: str | None
    tokenizer_class: str | None
    chat_unsupported: str | None
    tokenizer_unsupported: str | None

    @classmethod
    def read(cls, model_dir: Path, chat_template: str | Path | None) -> Self:
        """Read the directory. See `PromptEncoder.load` for `chat_template`.

        Raises:
            WarmrouteError: a file is broken or the template's file is missing.
        """
        config = read_json(model_dir / "config.json")
        tokenizer_config = read_json(model_dir / "tokenizer_config.json")
        templates, origin = _templates(model_dir, tokenizer_config)
        if chat_template is not None:
            templates, origin = _override(templates, chat_template)
        elif (processors := _processor_template(model_dir, config, tokenizer_config)) is not None:
            with_tools = templates.get("tool_use") or templates.get("default")
            templates, origin = {"default": processors[0]}, processors[1]
            if with_tools is not None:
                templates["tool_use"] = with_tools
        architecture = next(iter(config.get("architectures") or ()), None)
        model_type = config.get("model_type")
        chat_unsupported = _OWN_RENDERERS.get(architecture or "")
        if chat_unsupported is None and not templates and model_type in _FALLBACK_TEMPLATES:
            chat_unsupported = "a template that comes with the engine"
        return cls(
            model_dir=model_dir,
            tokenizer_config=tokenizer_config,
            templates=templates,
            template_origin=origin,
            model_type=model_type,
            tokenizer_class=tokenizer_config.get("tokenizer_class"),
            chat_unsupported=chat_unsupported,
            tokenizer_unsupported=_OWN_TOKENIZERS.get(architecture or "") or _mistral(model_dir),
        )


def _mistral(model_dir: Path) -> str | None:
    own_weights = any(model_dir.glob("consolidated*.safetensors"))
    own_tokenizer = any(model_dir.glob("tekken.json")) or any(model_dir.glob("tokenizer.model.v*"))
    return "Mistral" if own_weights and own_tokenizer else None


def _templates(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Template files first, then the tokenizer's configuration."""
    found: dict[str, str] = {}
    single = model_dir / "chat_template.jinja"
    if single.exists():
        found["default"] = single.read_text(encoding="utf-8")
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if found:
        return found, str(single)
    value = tokenizer_config.get("chat_template")
    origin = str(model_dir / "tokenizer_config.json")
    if isinstance(value, str):
        return {"default": value}, origin
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}, origin
    return {}, None


def _processor_template(
    model_dir: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any]
) -> tuple[str, str] | None:
    """The template of a multimodal model's processor, if that has one of its own, and the file it is in.

    The engine prefers it to the tokenizer's, also where there is only text, but not for requests with tools.
    """
    processor_path = model_dir / "processor_config.json"
    if not (
        processor_path.exists()
        or (model_dir / "preprocessor_config.json").exists()
        or "processor_class" in tokenizer_config
        or not _MULTIMODAL_KEYS.isdisjoint(config)
    ):
        return None  # without a processor, nobody reads what is left of another model's
    for path in (processor_path, model_dir / "chat_template.json"):
        template = read_json(path).get("chat_template")
        if isinstance(template, str):
            return template, str(path)
    return None


def _override(templates: Mapping[str, str], chat_template: str | Path) -> tuple[dict[str, str], str]:
    if isinstance(chat_template, str) and chat_template in templates:
        return {"default": templates[chat_template]}, f"the model's template {chat_template!r}"
    if isinstance(chat_template, str) and any(character in chat_template for character in "{}\n"):
        return {"default": chat_template}, "the given text"
    path = Path(chat_template)
    try:
        return {"default": path.read_text(encoding="utf-8")}, str(path)
    except OSError as error:
        raise WarmrouteError(f"chat template {path} cannot be read: {error.strerror}") from None
