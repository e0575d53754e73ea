import re
from array import array
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.prompt.encoders import FastEncoder, ReferenceEncoder, choose_encoder, corpus
from extproc.prompt.errors import Unsupported
from extproc.prompt.incremental import IncrementalEncoder, proven, reuse
from extproc.prompt.safe_cuts import SafeCuts, safe_cuts
from tests.support.tokenizers import KINDS, made, real, real_names, texts

CORPUS = [text for text in corpus(made("llama3")) if len(text) < 2000]


class Small(ReferenceEncoder):
    piece = (3, 12)


class SmallFast(FastEncoder):
    piece = (3, 12)


def small(tokenizer, limit=100_000, kind=Small):
    return IncrementalEncoder(kind(tokenizer), safe_cuts(tokenizer), limit)


def whole(tokenizer, text, *, special):
    return array("I", tokenizer.encode(text, add_special_tokens=special).ids)


edits = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from([0, 0, 1, 5]), texts | st.just(""), st.booleans()), max_size=6
)


def sessions(text, changes):
    """A text, and what becomes of it: grown at the end, or changed somewhere."""
    yield text, False
    for where, removed, put, special in changes:
        place = len(text) if where > 0.5 else int(where * len(text))
        text = text[:place] + put + text[place + removed :]
        yield text, special


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=texts, changes=edits)
def test_ids_are_those_of_the_whole_text_whatever_was_encoded_before(kind, text, changes):
    tokenizer = made(kind)
    encoder = SHARED.setdefault(kind, small(tokenizer, 20_000))
    for one, special in sessions(text, changes):
        assert encoder.encode(one, add_special_tokens=special) == whole(tokenizer, one, special=special)
    assert encoder.stats.size <= 20_000


@pytest.mark.parametrize("name", real_names())
@settings(max_examples=100)
@given(text=texts, changes=edits)
def test_ids_are_those_of_the_whole_text_with_real_tokenizers(name, text, changes):
    pytest.importorskip("fastokens", reason="the `fast` extra is not installed")
    tokenizer = real(name)
    if name not in SHARED:
        SHARED[name] = small(tokenizer, 200_000, SmallFast)
    for one, special in sessions(text, changes):
        expected = whole(tokenizer, one, special=special)
        assert SHARED[name].encode(one, add_special_tokens=special) == expected


SHARED: dict[str, IncrementalEncoder] = {}


@pytest.mark.parametrize("name", real_names())
def test_long_conversations_have_the_ids_of_the_whole(name):
    tokenizer = real(name)
    encoder = choose_encoder(tokenizer, fast=True)
    assert encoder.reuse == "between special tokens and between words"
    plain = choose_encoder(tokenizer, fast=True, cache_bytes=0)
    tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:40]
    random, source, text = Random(3), "\n".join(corpus(tokenizer)), ""
    for _ in range(12):
        begin = random.randrange(len(source) - 5000)
        text += random.choice(["", random.choice(tokens)]) + source[begin : begin + random.randrange(5000)]
        for special in (False, True):
            expected = plain.encode(text, add_special_tokens=special)
            assert encoder.encode(text, add_special_tokens=special) == expected


def test_a_grown_text_costs_only_what_is_new():
    encoder = choose_encoder(made("llama3"), fast=False)
    text = "Some words of prose, and 123 numbers. " * 1000
    encoder.encode(text, add_special_tokens=False)
    assert (encoder.stats.known, encoder.stats.new) == (0, len(text))
    grown = text + "And these are new. " * 10
    encoder.encode(grown, add_special_tokens=False)
    assert encoder.stats.new < len(text) + 190 + 2 * 2048
    assert encoder.stats.known + encoder.stats.new == len(text) + len(grown)


def test_a_change_in_an_early_message_leaves_the_later_ones_known():
    encoder = choose_encoder(made("llama3"), fast=False)
    turns = [f"<|im_start|>user\n{number} {'words of prose ' * 50}<|im_end|>\n" for number in range(60)]
    encoder.encode("".join(turns), add_special_tokens=False)
    before = encoder.stats.new
    turns[2] = "<|im_start|>user\nchanged<|im_end|>\n"
    encoder.encode("".join(turns), add_special_tokens=False)
    assert encoder.stats.new - before < 3 * 2048


def test_a_text_that_cannot_be_cut_is_known_when_it_comes_again():
    encoder = small(made("llama2"))
    for _ in range(2):
        encoder.encode("no special token in here " * 20, add_special_tokens=False)
    assert encoder.stats.new == encoder.stats.known == 500


def test_texts_encoded_in_threads_are_whole():
    tokenizer = made("llama3")
    encoder = small(tokenizer, 8000)

    def work(seed):
        random, text = Random(seed), ""
        for _ in range(60):
            text += random.choice(CORPUS)[:80]
            assert encoder.encode(text, add_special_tokens=True) == whole(tokenizer, text, special=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert encoder.stats.evicted > 0


@pytest.mark.parametrize("make", [Small, SmallFast])
def test_lone_surrogates_are_unsupported_and_leave_nothing(make):
    pytest.importorskip("fastokens", reason="the `fast` extra is not installed")
    encoder = small(real("tiny"), kind=make)
    for _ in range(2):
        with pytest.raises(Unsupported, match="surrogates"):
            encoder.encode("plain words here \ud800 and there", add_special_tokens=False)
    assert encoder.stats.pieces == 0


# --- the trial at load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_description_says_stands_the_trial(kind):
    encoder, cuts = ReferenceEncoder(made(kind)), safe_cuts(made(kind))
    assert proven(encoder, cuts, CORPUS) == (cuts if cuts.token or cuts.between else None)


def test_wrong_cuts_between_words_are_found_out():
    tokenizer = made("llama3")
    wrong = SafeCuts(safe_cuts(tokenizer).token, re.compile("[a-z][a-z]"))
    kept = proven(ReferenceEncoder(tokenizer), wrong, CORPUS)
    assert kept.token is wrong.token
    assert kept.between is None
    assert "differed" in reuse(kept)


def test_wrong_cuts_at_tokens_are_found_out():
    tokenizer = made("llama3")
    assert proven(ReferenceEncoder(tokenizer), SafeCuts(re.compile("[a-z]"), None, "x"), CORPUS) is None


def test_special_tokens_in_an_unknown_place_are_found_out():
    class Odd(ReferenceEncoder):
        def encode(self, text, *, add_special_tokens):
            ids = super().encode(text, add_special_tokens=False)
            return array("I", [*ids[:1], 7, *ids[1:]]) if add_special_tokens and len(ids) > 1 else ids

    assert proven(Odd(made("llama3")), safe_cuts(made("llama3")), CORPUS) is None


def test_without_a_cache_nothing_is_remembered():
    encoder = choose_encoder(made("llama3"), fast=False, cache_bytes=0)
    assert encoder.reuse == "off"
    encoder.encode("words " * 5000, add_special_tokens=False)
    assert encoder.stats.pieces == 0


def test_where_it_is_cut_is_said():
    assert choose_encoder(made("bert"), fast=False).reuse.startswith(
        "between special tokens only: its normalizer"
    )
    assert "takes what is beside it" in choose_encoder(made("right"), fast=False).reuse
