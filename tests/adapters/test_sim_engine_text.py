import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from extproc.adapters.sim_engine_text import Vocabulary
from extproc.core.errors import WarmrouteError
from extproc.prompt.tiny import tiny_model_path

VOCABULARY = Vocabulary.load(tiny_model_path())
TOKENIZER = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
EOS = json.loads((tiny_model_path() / "config.json").read_text())["eos_token_id"]


@settings(deadline=None)
@given(seed=st.integers(0, 2**64), limit=st.integers(1, 300), mean=st.floats(1, 200))
def test_an_answer_that_comes_back_in_a_chat_has_the_ids_it_was_generated_with(
    seed: int, limit: int, mean: float
) -> None:
    answer = VOCABULARY.answer(seed, limit, mean_tokens=mean)
    text = "".join(answer.pieces)
    assert 1 <= len(answer.token_ids) <= limit
    assert answer.stopped == (answer.token_ids[-1] == EOS)
    prefix = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    chat = f"<|im_start|>assistant\n{text}<|im_end|>\n"
    back = TOKENIZER.encode(chat, add_special_tokens=False).ids[len(prefix) :]
    assert back[: len(answer.token_ids)] == list(answer.token_ids)


def test_the_same_seed_says_the_same() -> None:
    answers = [VOCABULARY.answer(seed, 20, mean_tokens=9, ignore_eos=True).token_ids for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_lengths_are_obeyed() -> None:
    for seed in range(50):
        assert len(VOCABULARY.answer(seed, 30, mean_tokens=2, ignore_eos=True).token_ids) == 30
        answer = VOCABULARY.answer(seed, 30, mean_tokens=2, min_tokens=25)
        assert 26 <= len(answer.token_ids) <= 30
        assert len(VOCABULARY.answer(seed, 1, mean_tokens=50).token_ids) == 1


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(WarmrouteError, match=r"cannot read .*tokenizer\.json"):
        Vocabulary.load(tmp_path)


def test_a_tokenizer_without_words_cannot_write_answers(tmp_path: Path) -> None:
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(WarmrouteError, match="has 0 lower-case words"):
        Vocabulary.load(tmp_path)
