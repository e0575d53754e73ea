import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.errors import ProtocolError
from extproc.protocol.model_cards import ModelCard, parse_model_cards


def test_base_models_and_adapters():
    body = {
        "object": "list",
        "data": [
            {
                "id": "tiny",
                "object": "model",
                "root": "/m",
                "parent": None,
                "max_model_len": 16384,
                "permission": [],
            },
            {"id": "french", "object": "model", "root": "/a", "parent": "tiny", "max_model_len": None},
            {"id": "bare"},
        ],
    }
    assert parse_model_cards(json.dumps(body).encode()) == (
        ModelCard("tiny", None, 16384, "/m"),
        ModelCard("french", "tiny", None, "/a"),
        ModelCard("bare", None, None),
    )


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"data": [{"name": "x"}]}', b'{"data": [{"id": 1}]}', b"\xff"]
)
def test_other_bodies_are_protocol_errors(body):
    with pytest.raises(ProtocolError, match="/v1/models"):
        parse_model_cards(body)


def test_a_flood_of_models_is_a_protocol_error():
    body = b'{"data":[' + b'{"id":"x"},' * 40_000 + b'{"id":"y"}]}'
    with pytest.raises(ProtocolError, match="/v1/models has more than"):
        parse_model_cards(body)


@given(st.binary())
def test_any_bytes_give_cards_or_a_protocol_error(body):
    with contextlib.suppress(ProtocolError):
        assert isinstance(parse_model_cards(body), tuple)
