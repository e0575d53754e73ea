import json

import pytest
from tokenizers import Tokenizer

from extproc.core.errors import WarmrouteError
from extproc.prompt.tiny import tiny_model_path
from extproc.prompt.tokenizer import load_tokenizer, read_json, special_tokens


def load(config):
    return load_tokenizer(tiny_model_path(), config)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    tokenizer = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert 2 < len(load_tokenizer(tmp_path, {}).encode("several words of text").ids) < 50


def test_tokens_that_the_configuration_adds_are_added():
    config = {
        "added_tokens_decoder": {
            "4096": {"content": "<|new|>", "special": True},
            "4095": {"content": "<|im_end|>", "normalized": False, "special": True},
        },
        "bos_token": "<|bos|>",
        "extra_special_tokens": ["<|a|>", {"content": "<|b|>"}],
    }
    tokenizer = load(config)
    ids = [tokenizer.token_to_id(token) for token in ("<|new|>", "<|bos|>", "<|a|>", "<|b|>")]
    assert sorted(ids) == [4096, 4097, 4098, 4099]
    assert tokenizer.token_to_id("<|im_end|>") == 4095
    assert tokenizer.encode("x<|new|>y").ids[1] == 4096


def test_special_tokens_can_be_plain_text():
    tokenizer = load({"split_special_tokens": True})
    assert 4095 not in tokenizer.encode("<|im_end|>").ids


def test_the_post_processor_of_the_file_decides_about_bos():
    assert (
        load({"add_bos_token": True, "bos_token": "<|im_start|>"}).encode("x").ids == load({}).encode("x").ids
    )


def test_named_tokens_are_what_templates_see():
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "unk_token": None,
        "image_token": "<img>",
        "add_bos_token": True,
        "extra_special_tokens": {"boi_token": "<boi>", "x": 5},
    }
    expected = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<img>", "boi_token": "<boi>"}
    assert special_tokens(config) == expected


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(WarmrouteError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path, {})
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(WarmrouteError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path, {})
    path.write_text("{")
    with pytest.raises(WarmrouteError, match="not valid JSON"):
        read_json(path)
    path.write_text("[]")
    with pytest.raises(WarmrouteError, match="not a JSON object"):
        read_json(path)
    path.write_text(json.dumps({"a": 1}))
    assert read_json(path) == {"a": 1}
    assert read_json(tmp_path / "absent.json") == {}
