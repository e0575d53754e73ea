"""Where a text may be cut so that its parts, encoded one by one, have the ids of the whole.

Two kinds of places, both derived from the tokenizer's own description of itself:

- before an added token that the tokenizer takes out of the text first, wherever it stands;
- between two characters that no pre-tokenizer keeps together (`split_pattern`) and that no added token or
  normalizer joins.

Where the description holds something that is not surely understood, there are fewer places or none.
"""

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from extproc.prompt.split_pattern import SYMBOLS, PatternError, SplitPattern, parse

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Pieces of the text that come out of a pattern: all of it cut up, or what matches only.
_CUTTING = (("Isolated", False), ("Removed", True))
_REACH = 16_384  # characters looked at for a place between words


@dataclass(frozen=True, slots=True)
class SafeCuts:
    """Patterns for the places: `token` begins at one, `between` takes one character on either side.

    `note` says why there are none between words, if there are none.
    """

    token: "re.Pattern[str] | None"
    between: "re.Pattern[str] | None"
    note: str | None = None

    def pieces(self, text: str, shortest: int, longest: int) -> list[str]:
        """The text in pieces of about `shortest` to `longest` characters, in order; longer where no place is.

        Every piece but the last depends only on itself and what comes before it, so texts with a common
        beginning have the same first pieces.
        """
        out = []
        begin, last = 0, len(text) - longest
        token, between = self.token, self.between
        while begin < last:
            far = begin + longest
            if token is not None and (found := token.search(text, begin + shortest, far)):
                cut = found.start()
            elif between is not None and (found := between.search(text, far - 1, far + _REACH)):
                cut = found.start() + 1
            elif token is not None and (found := token.search(text, far)):
                cut = found.start()
            else:
                break
            out.append(text[begin:cut])
            begin = cut
        out.append(text[begin:])
        return out


def safe_cuts(tokenizer: Tokenizer) -> SafeCuts:
    """The places of a tokenizer that takes special tokens out of texts."""
    if getattr(tokenizer.model, "dropout", None):
        return SafeCuts(None, None, "the same text has other ids each time")
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    normalizer, pre_tokenizer = _described(tokenizer.normalizer), _described(tokenizer.pre_tokenizer)
    return SafeCuts(_before_tokens(added, normalizer), *_between(added, normalizer, pre_tokenizer))


def _described(component: Any) -> Any:
    """A component as in `tokenizer.json`: what it is pickled as. The whole file would be megabytes."""
    return None if component is None else json.loads(component.__getstate__())


# --- before added tokens ---------------------------------------------------------------------------------


def _does_nothing(normalizer: Any) -> bool:
    return normalizer is None or (
        normalizer["type"] == "Sequence" and all(map(_does_nothing, normalizer["normalizers"]))
    )


def _before_tokens(added: Sequence[AddedToken], normalizer: Any) -> "re.Pattern[str] | None":
    """Matches at the begin of added tokens that are taken whatever surrounds them.

    A token is, if its first character is in no token but as the first: then none that begins earlier reaches
    into it. What the tokenizer looks for in the second place, in normalized text, must also be safe from
    tokens of the first, and from the normalizer. Tokens that take or ask for something on their left are
    left out with all that begin alike; so are those that a neighbour might ask about.
    """
    inside = {char for token in added for char in token.content[1:]}
    shy = {token.content[0] for token in added if token.lstrip or token.single_word}
    shy |= {token.content[0] for token in added if unicodedata.category(token.content[0])[0] not in "PS"}
    plain = [token.content for token in added if not token.normalized]
    late = [token.content for token in added if token.normalized]
    if late and _does_nothing(normalizer):
        plain += [
            token for token in late if not any(one[0] in token[1:] or token.startswith(one) for one in plain)
        ]
    contents = sorted({token for token in plain if token[0] not in inside and token[0] not in shy})
    return re.compile(_any_of(contents)) if contents else None


def _any_of(contents: Sequence[str]) -> str:
    """A pattern for the begin of any of these: as a tree, which `re` walks faster than a list of hundreds."""
    branches: dict[str, list[str]] = {}
    for content in contents:
        if not content:
            return ""
        branches.setdefault(content[0], []).append(content[1:])
    parts = [re.escape(char) + _any_of(rest) for char, rest in branches.items()]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


# --- between words ---------------------------------------------------------------------------------------


def _between(
    added: Sequence[AddedToken], normalizer: Any, pre_tokenizer: Any
) -> "tuple[re.Pattern[str] | None, str | None]":
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None, "an added token takes what is beside it"
    if not _keeps_places(normalizer):
        return None, "its normalizer may change what is beside a cut"
    try:
        patterns = _patterns(pre_tokenizer)
    except PatternError as error:
        return None, f"its pre-tokenizer: {error}"
    covered = set().union(*(pattern.covered() for pattern in patterns))
    pairs = set.intersection(*(pattern.parted() for pattern in patterns)) if patterns else set()
    inner = {char for token in added for char in token.content[1:]}
    right = {
        at
        for at, symbol in enumerate(SYMBOLS)
        if (symbol.inert or _does_nothing(normalizer))
        and not any(symbol.low <= ord(char) <= symbol.high for char in inner)
    }
    source = _pairs_pattern({(x, y) for x, y in pairs if y in right and not covered.isdisjoint((x, y))})
    return (re.compile(source), None) if source else (None, "its pre-tokenizer never surely ends a word")


def _keeps_places(normalizer: Any) -> bool:
    """Whether both sides of a cut before an `inert` symbol are normalized as if they were alone."""
    return (
        _does_nothing(normalizer)
        or normalizer["type"] == "NFC"
        or (normalizer["type"] == "Sequence" and all(map(_keeps_places, normalizer["normalizers"])))
    )


def _patterns(pre_tokenizer: Any) -> list[SplitPattern]:
    """What cuts the text into words, one after the other.

    Raises:
        PatternError: not all of it is understood.
    """
    if pre_tokenizer is None:
        return []
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        stages = pre_tokenizer["pretokenizers"]
        if any(stage["type"] == "ByteLevel" for stage in stages[:-1]):
            raise PatternError("something comes after bytes")
        return [pattern for stage in stages for pattern in _patterns(stage)]
    if kind == "ByteLevel":
        if pre_tokenizer.get("add_prefix_space", True):
            raise PatternError("it puts a space before texts")
        return [parse(_GPT2_PATTERN)] if pre_tokenizer.get("use_regex", True) else []
    if kind == "Digits":
        return [parse(r"\p{N}" if pre_tokenizer.get("individual_digits") else r"\p{N}+")]
    if kind == "Split" and "Regex" in pre_tokenizer["pattern"]:
        if (pre_tokenizer["behavior"], pre_tokenizer["invert"]) not in _CUTTING:
            raise PatternError(f"behavior {pre_tokenizer['behavior']}")
        return [parse(pre_tokenizer["pattern"]["Regex"])]
    raise PatternError(f"type {kind}")


def _pairs_pattern(pairs: Iterable[tuple[int, int]]) -> str:
    rights: dict[int, set[int]] = {}
    for x, y in pairs:
        rights.setdefault(x, set()).add(y)
    lefts: dict[frozenset[int], list[int]] = {}
    for x, right in sorted(rights.items()):
        lefts.setdefault(frozenset(right), []).append(x)
    return "|".join(f"[{_symbols(left)}][{_symbols(sorted(right))}]" for right, left in lefts.items())


def _symbols(indices: Collection[int]) -> str:
    return "".join(str(SYMBOLS[at]) for at in indices)
