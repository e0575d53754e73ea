"""A child without a process: its other end is here."""

import json
import threading
from array import array
from multiprocessing import Pipe

import pytest

from extproc.adapters.prompt_child import PromptChild
from extproc.adapters.prompt_messages import Broken, Done, Job, Load, Loaded, NotHere, Refused
from extproc.core.hashing import ChainKey, prompt_chain
from extproc.prompt.recipe import EncoderRecipe, identity_of
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import RequestKind

RECIPE = EncoderRecipe(str(tiny_model_path()))
ENOUGH_S = 60.0


@pytest.fixture
def settled():
    return []


@pytest.fixture
def link(settled):
    ours, theirs = Pipe()
    child = threading.Thread(target=PromptChild(theirs, 1, lambda: settled.append(1)).serve)
    child.start()
    yield ours
    ours.close()  # its other end: it ends by itself
    child.join(ENOUGH_S)
    assert not child.is_alive()
    theirs.close()


def ask(link, message, body=None):
    link.send(message)
    if body is not None:
        link.send_bytes(json.dumps(body).encode() if isinstance(body, dict) else body)
    assert link.poll(ENOUGH_S)
    return link.recv()


def job(chain=None, encoder=1):
    return Job(5, encoder, RequestKind.COMPLETION, chain)


def test_it_says_what_it_has_loaded_and_encodes_with_that(link, settled):
    encoder = RECIPE.load()
    assert ask(link, Load(1, RECIPE)) == Loaded(1, identity_of(encoder))
    assert settled == [1]
    done = ask(link, job(ChainKey(4, 9)), {"prompt": ["one two three " * 9, "four"]})
    assert isinstance(done, Done)
    assert (done.number, done.prompts, done.encoded_s) == (5, 2, None)
    ids = [array("I", link.recv_bytes()) for _ in range(2)]
    chains = [array("Q", link.recv_bytes()) for _ in range(2)]
    assert [list(chain) for chain in chains] == [prompt_chain(one, 4, 9) for one in ids]
    assert len(chains[0]) > 0
    assert done.encoded.new > 0


def test_no_hashes_follow_where_none_are_asked_for(link):
    ask(link, Load(1, RECIPE))
    for _ in range(2):  # the second answer begins where the first has ended
        done = ask(link, job(), {"prompt": "one two"})
        assert len(array("I", link.recv_bytes())) > 0
        assert done.hashed.new == 0


def test_what_goes_wrong_is_told_without_the_prompt_and_the_next_one_is_encoded(link):
    assert ask(link, Load(2, EncoderRecipe("/no/such/model"))).encoder == 2
    assert isinstance(ask(link, Load(2, EncoderRecipe("/no/such/model"))), Refused)
    assert ask(link, job(encoder=2), {"prompt": "a secret"}) == Broken(5, "KeyError")
    ask(link, Load(1, RECIPE))
    assert ask(link, job(), {"prompt": "a secret", "suffix": "b"}) == NotHere(5, "suffix", None)
    assert ask(link, job(), b"{a secret") == Broken(5, "BadRequest")
    assert isinstance(ask(link, job(), {"prompt": "one"}), Done)
