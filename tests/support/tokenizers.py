"""Tokenizers of many kinds, trained on a few lines, and texts that are hard to cut."""

import os
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from extproc.prompt.tiny import tiny_model_path
from extproc.prompt.tokenizer import load_tokenizer, read_json

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"gpt2": GPT2, "llama3": LLAMA3, "cl100k": CL100K, "o200k": O200K, "deepseek": DEEPSEEK}

_LINES = [
    "The quick brown fox can't jump over 1,234 lazy dogs; it's 3.14 o'clock.\n\n",
    "def f(x: int) -> str:\n    return f'{x**2!r}'  # comment\n\tpass\r\n",
    "東京都の天気は晴れです。今日は2024年1月1日，안녕하세요 세계. Привет, мир! ЁЖИК مرحبا שלום नमस्ते สวัสดี\n",
    "Zürich déjà vu naïve café a\u0301 e\u0301 \u1100\u1161\u11a8 <b>&amp;</b> user@host.tld https://a.b/c?d=e\n",
] * 4


def _split(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def _bytes(*stages: Any) -> Any:
    return pre_tokenizers.Sequence(
        [*stages, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _special(*contents: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(content, special=True, **{"normalized": False, **flags}) for content in contents]


_CHAT = _special("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_MADE: dict[str, dict[str, Any]] = {
    "gpt2": {"pre": pre_tokenizers.ByteLevel(add_prefix_space=False), "added": _special("<|endoftext|>")},
    "gpt2-space": {"pre": pre_tokenizers.ByteLevel(add_prefix_space=True), "added": _CHAT},
    "llama3": {"pre": _bytes(_split(LLAMA3)), "added": _CHAT, "bos": True},
    "cl100k": {"pre": _bytes(_split(CL100K, "removed", invert=True)), "added": _CHAT},
    "o200k": {"pre": _bytes(_split(O200K)), "added": _CHAT, "norm": normalizers.NFC()},
    "deepseek": {
        "pre": _bytes(_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(DEEPSEEK)),
        "added": [*_special("<｜User｜>", "<｜end｜>"), AddedToken("<think>", normalized=True)],
        "norm": normalizers.Sequence([]),
    },
    "digits": {
        "pre": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "added": _CHAT,
    },
    "gaps": {"pre": _bytes(_split(r"\p{N}+"), _split("[a-z]+[.!]")), "added": _CHAT},
    "nfc-late": {
        "pre": _bytes(_split(LLAMA3)),
        "norm": normalizers.NFC(),
        "added": [*_CHAT, AddedToken("don't", normalized=True), AddedToken("  ", normalized=True)],
    },
    "strips": {
        "pre": _bytes(_split(LLAMA3)),
        "added": [*_CHAT, *_special("<mask>", lstrip=True), *_special("[R]", rstrip=True)],
    },
    "right": {"pre": _bytes(_split(LLAMA3)), "added": _special("<|a|>", "<|b|>", rstrip=True)},
    "words": {"pre": _bytes(_split(GPT2)), "added": [*_CHAT, *_special("fox", "=x=", single_word=True)]},
    "overlaps": {
        "pre": _bytes(_split(GPT2)),
        "added": _special("<<a>", "<a>", "<a>b", "a>", "[x]", "[x]]", "x y", "\n\n"),
    },
    "late-overlaps": {
        "pre": _bytes(_split(GPT2)),
        "added": [
            *_special("[a", "|"),
            AddedToken("[a]", normalized=True),
            AddedToken("{b|}", normalized=True),
        ],
    },
    "metaspace": {"pre": pre_tokenizers.Metaspace(prepend_scheme="first"), "added": _CHAT, "bytes": False},
    "metaspace-always": {"pre": pre_tokenizers.Metaspace(), "added": _CHAT, "bytes": False, "bos": True},
    "llama2": {
        "pre": None,
        "norm": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        "added": _special("<s>", "</s>", "[INST]", "[/INST]"),
        "bytes": False,
        "bos": True,
    },
    "gemma": {
        "pre": pre_tokenizers.Split(" ", "merged_with_previous"),
        "norm": normalizers.Replace(" ", "▁"),
        "added": _special("<start_of_turn>", "<end_of_turn>", "\n\n", "\n\n\n"),
        "bytes": False,
    },
    "bert": {
        "pre": pre_tokenizers.BertPreTokenizer(),
        "norm": normalizers.BertNormalizer(lowercase=True),
        "added": _special("[CLS]", "[SEP]"),
        "bytes": False,
        "bos": True,
    },
}
KINDS = sorted(_MADE)


@cache
def made(kind: str) -> Tokenizer:
    """A small tokenizer of a kind."""
    parts = _MADE[kind]
    in_bytes = parts.get("bytes", True)
    tokenizer = Tokenizer(models.BPE(byte_fallback=not in_bytes, unk_token=None if in_bytes else "<unk>"))
    if parts.get("norm") is not None:
        tokenizer.normalizer = parts["norm"]
    if parts["pre"] is not None:
        tokenizer.pre_tokenizer = parts["pre"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if in_bytes else []
    special = [] if in_bytes else ["<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    tokenizer.add_tokens(parts["added"])
    if in_bytes:
        tokenizer.decoder = decoders.ByteLevel()
    if parts.get("bos"):
        first = parts["added"][0].content
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {first}",
            pair=f"{first} $A {first} $B:1",
            special_tokens=[(first, tokenizer.token_to_id(first))],
        )
    return tokenizer


def real_names() -> list[str]:
    """Real tokenizers at hand: the tiny model's, and those that WARMROUTE_TOKENIZERS_DIR holds."""
    folder = os.environ.get("WARMROUTE_TOKENIZERS_DIR")
    found = sorted(path.parent.name for path in Path(folder).glob("*/tokenizer.json")) if folder else []
    return ["tiny", *found]


@cache
def real(name: str) -> Tokenizer:
    """A real tokenizer, set up as in use."""
    folder = tiny_model_path() if name == "tiny" else Path(os.environ["WARMROUTE_TOKENIZERS_DIR"]) / name
    return load_tokenizer(folder, read_json(folder / "tokenizer_config.json"))


_HARD = [
    *" \n\t\r'\"!.,;:<>|[](){}=_-/\\#@&~^`$%*+?0129aszASZ",
    *[
        "  ",
        "\n\n",
        " \n ",
        "\r\n",
        "'s",
        "'LL",
        "can't",
        "don't",
        " the",
        "fox",
        "123",
        "1,234",
        "x y",
        "=x=",
    ],
    *[
        "é",
        "e\u0301",
        "\u0301",
        "\u0338",
        "<\u0338",
        "=\u0338",
        "\u3099",
        "カ\u3099",
        "가",
        "\u11a8",
        "\u1100",
    ],
    *[
        "東京",
        "。",
        "，",
        "！",
        "の",
        "カ",
        "мир",
        "Ж",
        "سلام",
        "שלום",
        "नम",
        "\u093c",
        "สวัส",
        "ß",
        "ſ",
        "\u212a",
    ],
    *[
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x85",
        "\x1c",
        "\x00",
        "\ufeff",
        "\u200d",
        "👩‍👩‍👧",
        "🇨🇭",
        "½",
        "²",
        "Ⅷ",
        "_",
    ],
    *[
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<|im_",
        "|>",
        "<|",
        "<<a>",
        "<a>",
        "<a>b",
        "a>",
        "[x]",
    ],
    *[
        "[x]]",
        "[R]",
        "<mask>",
        " <mask> ",
        "[a",
        "[a]",
        "{b|}",
        "|",
        "<|a|>",
        "<|b|> ",
        "<｜User｜>",
        "<｜end｜>",
    ],
    *["[INST]", "</s>", "<s>", "<start_of_turn>", "\n\n\n", "[CLS]", "[SEP]", "<unk>", "▁", "<|endoftext|>"],
]
texts = st.lists(
    st.sampled_from(_HARD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=40
).map("".join)
"""Text of fragments on which tokenizers differ."""
