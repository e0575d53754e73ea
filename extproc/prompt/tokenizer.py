"""The model's tokenizer as the engine sets it up: `tokenizer.json`, adjusted by `tokenizer_config.json`.

The engine loads tokenizers through transformers, which adds special tokens that the file lacks. It ignores
`add_bos_token` and `add_eos_token` where there is a `tokenizer.json`: the post-processor in it decides. Some
model-specific classes there rebuild more than that; `warmroute check` compares our ids with the engine's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from extproc.core.errors import WarmrouteError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file.

    Raises:
        WarmrouteError: the file is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise WarmrouteError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise WarmrouteError(f"{path} is not a JSON object")
    return value


def load_tokenizer(model_dir: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a model directory. `config` is its `tokenizer_config.json`.

    Raises:
        WarmrouteError: there is no readable `tokenizer.json`.
    """
    path = model_dir / "tokenizer.json"
    if not path.exists():
        raise WarmrouteError(
            f"{path} is missing: point the setting at a directory with the model's tokenizer files"
            " (tokenizer.json, tokenizer_config.json, config.json)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise WarmrouteError(f"{path} cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    _add_missing_tokens(tokenizer, config)
    return tokenizer


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, as chat templates see them (`bos_token` and so on)."""
    named = {key: config[key] for key in NAMED_TOKENS if key in config}
    named.update({key: value for key, value in config.items() if key.endswith("_token")})
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update(extra)
    texts = {key: _token_text(value) for key, value in named.items()}
    return {key: text for key, text in texts.items() if text is not None}


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    tokens = [AddedToken(**fields) for _, fields in sorted(declared.items(), key=lambda item: int(item[0]))]
    tokenizer.add_tokens([token for token in tokens if repr(token) not in known])
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    texts = [*special_tokens(config).values()]
    if isinstance(extra, list):
        texts += [text for item in extra if (text := _token_text(item)) is not None]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts if text not in present])
