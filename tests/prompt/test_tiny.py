import json

from tokenizers import Tokenizer

from extproc.prompt.tiny import tiny_model_path

PROSE = (
    "Ordinary balancing pays for the same prefill several times: two requests of the same length look equal, "
    "though one may be almost free on the replica that holds its prefix."
)


def test_the_model_is_complete_and_consistent():
    path = tiny_model_path()
    config = json.loads((path / "config.json").read_text())
    settings = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096
    assert tokenizer.token_to_id(settings["eos_token"]) == config["eos_token_id"]
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert config["max_position_embeddings"] == 131_072


def test_prose_takes_a_realistic_number_of_tokens():
    tokenizer = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
    assert len(tokenizer.encode(PROSE).ids) < 2 * len(PROSE.split())


def test_any_text_survives_a_round_trip():
    tokenizer = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
    text = "Zürich 東京 🤖\n\t <|im_start|>\x00"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_it_is_small_enough_to_ship():
    assert (tiny_model_path() / "tokenizer.json").stat().st_size < 250_000
