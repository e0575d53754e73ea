import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from extproc.prompt import encoders
from extproc.prompt.encoders import FastEncoder, ReferenceEncoder, choose_encoder, corpus, first_difference
from extproc.prompt.errors import Unsupported
from extproc.prompt.tiny import tiny_model_path

TOKENIZER = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def fast():
    pytest.importorskip("fastokens", reason="the `fast` extra is not installed")
    return FastEncoder(TOKENIZER)


def test_the_fast_encoder_is_chosen_when_it_agrees(fast):
    chosen = choose_encoder(TOKENIZER, fast=True)
    assert (chosen.name, chosen.note) == ("fastokens", None)


def test_the_reference_is_chosen_when_switched_off():
    chosen = choose_encoder(TOKENIZER, fast=False)
    assert chosen.name == "tokenizers"
    assert "switched off" in chosen.note


def test_the_reference_is_chosen_when_the_library_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    chosen = choose_encoder(TOKENIZER, fast=True)
    assert chosen.name == "tokenizers"
    assert "not installed" in chosen.note


def test_the_reference_is_chosen_when_one_id_differs(monkeypatch, fast):
    class Wrong(FastEncoder):
        def encode(self, text, *, add_special_tokens):
            ids = super().encode(text, add_special_tokens=add_special_tokens)
            if "日" in text:
                ids[-1] ^= 1
            return ids

    monkeypatch.setattr(encoders, "FastEncoder", Wrong)
    chosen = choose_encoder(TOKENIZER, fast=True)
    assert chosen.name == "tokenizers"
    assert "other ids" in chosen.note


def test_the_reference_is_chosen_when_the_tokenizer_cannot_be_read(monkeypatch):
    def unreadable(tokenizer):
        raise ValueError("unknown model")

    monkeypatch.setattr(encoders, "FastEncoder", unreadable)
    assert "unknown model" in choose_encoder(TOKENIZER, fast=True).note


def test_the_reference_is_chosen_when_special_tokens_are_split():
    tokenizer = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    assert choose_encoder(tokenizer, fast=True).name == "tokenizers"


def test_the_fast_encoder_falls_back_on_what_it_cannot_encode(fast):
    fast = FastEncoder(TOKENIZER)
    fast._tokenizer = None
    assert fast.encode("hello", add_special_tokens=False) == array("I", TOKENIZER.encode("hello").ids)


@pytest.mark.parametrize("special", [True, False])
def test_lone_surrogates_are_unsupported(fast, special):
    for encoder in (fast, ReferenceEncoder(TOKENIZER)):
        with pytest.raises(Unsupported, match="surrogates"):
            encoder.encode("a\ud800", add_special_tokens=special)


def test_the_corpus_names_the_text_that_differs(fast):
    class Empty(ReferenceEncoder):
        def encode(self, text, *, add_special_tokens):
            return array("I")

    texts = corpus(TOKENIZER)
    assert first_difference(ReferenceEncoder(TOKENIZER), fast, texts) is None
    assert first_difference(ReferenceEncoder(TOKENIZER), Empty(TOKENIZER), texts) == texts[0]
    assert any("<|im_start|>" in text for text in texts)


@given(
    st.lists(st.text() | st.sampled_from(["<|im_start|>", "<|im_end|>", " the", "\n\n"])).map("".join),
    st.booleans(),
)
def test_both_encoders_agree_on_any_text(text, special):
    pytest.importorskip("fastokens", reason="the `fast` extra is not installed")
    try:
        expected = ReferenceEncoder(TOKENIZER).encode(text, add_special_tokens=special)
    except Unsupported:
        return
    assert SHARED.encode(text, add_special_tokens=special) == expected


SHARED = choose_encoder(TOKENIZER, fast=True)
