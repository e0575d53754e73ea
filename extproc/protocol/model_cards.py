"""What `GET /v1/models` says: the served base model names and the adapters on top of them."""

from typing import NamedTuple

import msgspec

from extproc.core.errors import ProtocolError


class ModelCard(NamedTuple):
    """One served model. `parent` is set for an adapter: the name of its base model.

    `root` is what the server loaded: a path or the name of a repository. It tells revisions apart where
    names do not.
    """

    id: str
    parent: str | None
    max_model_len: int | None
    root: str | None = None


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None
    root: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_MOST_OBJECTS = 1 << 15  # two or three for each model or adapter
_DECODER = msgspec.json.Decoder(_Cards)


def parse_model_cards(body: bytes) -> tuple[ModelCard, ...]:
    """Model cards in the order of the server.

    Raises:
        ProtocolError: not a list of models in OpenAI's form.
    """
    if body.count(b"{") > _MOST_OBJECTS:
        raise ProtocolError(f"/v1/models has more than {_MOST_OBJECTS} entries")
    try:
        cards = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"/v1/models is not a list of models: {error}") from error
    return tuple(ModelCard(card.id, card.parent, card.max_model_len, card.root) for card in cards.data)
