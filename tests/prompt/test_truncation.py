from array import array

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from extproc.prompt.errors import Unsupported
from extproc.prompt.tiny import tiny_model_path
from extproc.prompt.truncation import Truncation

TEXT = "one two three four five six seven"


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 4094)]
    )
    return tokenizer


@pytest.mark.parametrize(("side", "kept"), [(None, [3, 4]), ("left", [3, 4]), ("right", [1, 2])])
def test_finished_ids_are_cut(side, kept):
    assert Truncation(2, side).cut(array("I", [1, 2, 3, 4])) == array("I", kept)
    assert Truncation(4, side).cut(array("I", [1, 2, 3, 4])) == array("I", [1, 2, 3, 4])


def test_bos_survives_unless_a_side_is_named(tokenizer):
    whole = tokenizer.encode(TEXT).ids
    assert list(Truncation(4, None).encode(tokenizer, TEXT, add_special_tokens=True)) == [4094, *whole[-3:]]
    assert list(Truncation(4, "left").encode(tokenizer, TEXT, add_special_tokens=True)) == whole[-4:]
    assert list(Truncation(4, "right").encode(tokenizer, TEXT, add_special_tokens=True)) == whole[:4]
    assert list(Truncation(4, None).encode(tokenizer, TEXT, add_special_tokens=False)) == whole[-4:]
    assert list(Truncation(99, None).encode(tokenizer, TEXT, add_special_tokens=True)) == whole


def test_no_room_for_bos_is_unsupported(tokenizer):
    with pytest.raises(Unsupported):
        Truncation(1, None).encode(tokenizer, TEXT, add_special_tokens=True)


@pytest.mark.parametrize("limit", [-1, 0, True, "3", 2.0])
def test_limits_that_depend_on_the_engine_are_unsupported(limit):
    with pytest.raises(Unsupported):
        Truncation.from_request({"truncate_prompt_tokens": limit})


def test_most_requests_ask_for_none():
    assert Truncation.from_request({}) is None
    assert Truncation.from_request({"truncation_side": "left"}) is None
    assert Truncation.from_request({"truncate_prompt_tokens": 3}) == Truncation(3, None)
