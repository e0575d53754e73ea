"""Train the tiny byte-level BPE of `extproc/data/tiny_model/` from text every Python ships with.

Usage: `python -m tests.support.train_tiny_tokenizer OUT_DIR [EXTRA_TEXT_FILE ...]`. The corpus is the
docstrings of the standard library, a slice of its source, and any extra files (licence texts, for one).
The result depends on the Python that runs it, so the trained file is checked in and the script is only kept
to say where it came from.
"""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SOURCE_SHARE = 12  # one module in this many contributes its code as well
# The pre-tokenizer of Qwen2: words with their leading space, single digits, punctuation, white space.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus(extra: list[Path]) -> Iterator[str]:
    """Texts to train on, in a fixed order."""
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        source = path.read_text(encoding="utf-8")
        if number % SOURCE_SHARE == 0:
            yield source
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text
    for path in extra:
        # Unwrapped paragraphs: prompts rarely break lines at 72 columns.
        for paragraph in path.read_text(encoding="utf-8", errors="ignore").split("\n\n"):
            yield " ".join(paragraph.split())


def train(extra: list[Path]) -> Tokenizer:
    """A byte-level BPE with `VOCAB_SIZE` tokens, the special ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(extra), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    return tokenizer


def main(arguments: list[str]) -> None:
    """Write OUT_DIR/tokenizer.json."""
    out, *extra = arguments
    path = Path(out) / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    train([Path(name) for name in extra]).save(str(path), pretty=False)
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
