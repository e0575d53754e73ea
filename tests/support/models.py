"""Model directories for tests: a tokenizer, a chat template, and a configuration to serve without weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from extproc.prompt.tiny import tiny_model_path

VOCAB_MULTIPLE = 64

# A template of the other kind: prints the parts of a message one by one, knows developers, emits BOS and the
# date, and refuses what it does not like.
PARTS_TEMPLATE = """\
{{- bos_token -}}
[date {{ strftime_now("%Y-%m-%d") }}]
{%- macro show(body) -%}
    {%- if body is string -%}{{ body }}
    {%- else -%}
        {%- for part in body -%}
            {%- if part.type == "text" -%}({{ part.text }}{{ "+" + (part.mark | string) if part.mark }})
            {%- else -%}<{{ part.type }}>{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message.role == "forbidden" -%}{{ raise_exception("no such role") }}{%- endif -%}
    {%- if message.role == "developer" and message.tools -%}{{ message.tools | tojson }}{%- endif -%}
    <|im_start|>{{ message.role }} {{ show(message.content) }}
    {%- if message.reasoning_content %} think={{ message.reasoning_content }}{%- endif -%}
    {%- for call in message.tool_calls or [] %} {{ call | tojson(indent=1) }}{%- endfor -%}
    {%- if message.tool_call_id %} for={{ message.tool_call_id }}{%- endif -%}
    <|im_end|>
    {%- if loop.index > 50 -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{%- for document in documents or [] %}<doc>{{ document | tojson }}</doc>{%- endfor -%}
{%- if effort_note is defined %}{{ effort_note }}{%- endif -%}
{%- if reasoning_effort is defined %}effort={{ reasoning_effort }}{%- endif -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% generation %}{% endgeneration %}{%- endif -%}
"""
PARTS_TOOL_TEMPLATE = "{{ bos_token }}TOOLS {{ tools | tojson }}\n" + PARTS_TEMPLATE.partition("\n")[2]


def make_model_dir(out: Path, tokenizer_dir: Path, tokenizer_config: Mapping[str, Any] | None = None) -> Path:
    """A two-layer Llama around a tokenizer directory. `tokenizer_config`: changes to its configuration.

    Llama, because transformers believes a Llama's `tokenizer_class`; a Qwen2's it replaces.
    """
    out.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer_dir / "tokenizer.json", out)
    settings = json.loads((tokenizer_dir / "tokenizer_config.json").read_text())
    settings.update(tokenizer_config or {})
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    config = json.loads((tiny_model_path() / "config.json").read_text())
    config.update(
        architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, mlp_bias=False
    )
    config["vocab_size"] = (highest // VOCAB_MULTIPLE + 1) * VOCAB_MULTIPLE
    eos = settings.get("eos_token")
    eos_id = tokenizer.token_to_id(eos["content"] if isinstance(eos, dict) else eos)
    config["eos_token_id"] = config["pad_token_id"] = eos_id
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_id}))
    return out


def make_bos_model_dir(out: Path) -> Path:
    """The tiny model with a BOS that its post-processor adds, and a template that emits it as well."""
    make_model_dir(
        out,
        tiny_model_path(),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "chat_template": [
                {"name": "default", "template": PARTS_TEMPLATE},
                {"name": "tool_use", "template": PARTS_TOOL_TEMPLATE},
            ],
        },
    )
    settings = json.loads((out / "tokenizer_config.json").read_text())
    del settings["add_bos_token"]
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True, normalized=False)])
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B:1", special_tokens=[("<|bos|>", bos)]
    )
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = json.loads((out / "config.json").read_text())
    config["vocab_size"] = (bos // VOCAB_MULTIPLE + 1) * VOCAB_MULTIPLE
    (out / "config.json").write_text(json.dumps(config))
    return out
