"""`truncate_prompt_tokens`: which tokens of a long prompt the engine keeps."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from tokenizers import Tokenizer

from extproc.prompt.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep `limit` tokens. `side` is where tokens are cut; None leaves it to the tokenizer, which cuts left.

    With a side named in the request the engine slices the finished ids. Without, the tokenizer cuts the
    text's own tokens and then adds its special tokens, so that BOS survives.
    """

    limit: int
    side: Literal["left", "right"] | None

    @classmethod
    def from_request(cls, body: Mapping[str, Any]) -> Self | None:
        """The request's truncation; None if it asks for none.

        Raises:
            Unsupported: it depends on the engine's context length (-1), or is not valid.
        """
        limit, side = body.get("truncate_prompt_tokens"), body.get("truncation_side")
        if limit is None:
            return None
        if type(limit) is not int or limit < 1 or side not in (None, "left", "right"):
            raise Unsupported("truncation")
        return cls(limit, cast('Literal["left", "right"] | None', side))

    def cut(self, ids: "array[int]") -> "array[int]":
        """Finished ids, cut to the limit."""
        if len(ids) <= self.limit:
            return ids
        return ids[: self.limit] if self.side == "right" else ids[-self.limit :]

    def encode(self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> "array[int]":
        """The ids of a text, cut to the limit.

        Raises:
            Unsupported: not even the special tokens would fit.
        """
        try:
            encoding = tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise Unsupported("text", "lone surrogates") from None
        if self.side is None and add_special_tokens:
            room = self.limit - tokenizer.num_special_tokens_to_add(is_pair=False)
            if room < 1:
                raise Unsupported("truncation", "no room for special tokens")
            encoding.truncate(room, stride=0, direction="left")
        if add_special_tokens:
            encoding = tokenizer.post_process(encoding, None, add_special_tokens=True)
        return self.cut(array("I", encoding.ids))
