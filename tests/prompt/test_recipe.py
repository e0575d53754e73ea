import json
import pickle
from pathlib import Path

import pytest

from extproc.core.errors import WarmrouteError
from extproc.prompt.errors import Unsupported
from extproc.prompt.recipe import EncoderRecipe, identity_of
from extproc.prompt.template_guard import TemplateLimits
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import parse_request


def chat(content="a question"):
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return parse_request("POST", "/v1/chat/completions", {}, json.dumps(body).encode())


def recipe(tmp_path: Path, template: str, **options) -> EncoderRecipe:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    return EncoderRecipe(str(tiny_model_path()), chat_template=path, **options)


def sent(made: EncoderRecipe) -> EncoderRecipe:
    """As another process gets it."""
    return pickle.loads(pickle.dumps(made))  # noqa: S301  # our own


def test_what_is_made_elsewhere_is_known_as_what_is_made_here(tmp_path):
    made = recipe(
        tmp_path, "{{ messages[0].content }}{{ word }}", template_kwargs={"word": "!", "n": [1, None]}
    )
    here, there = made.load(), sent(made).load()
    assert identity_of(here) == identity_of(there)
    assert here.encode(chat()) == there.encode(chat())


@pytest.mark.parametrize("changed", [{"chat_template": None}, {"template_kwargs": {"word": "?"}}])
def test_another_template_or_other_arguments_are_another_identity(tmp_path, changed):
    made = recipe(tmp_path, "{{ messages[0].content }}{{ word }}", template_kwargs={"word": "!"})
    other = EncoderRecipe(**{**made.__dict__, **changed})
    assert identity_of(made.load()) != identity_of(other.load())


def test_limits_of_templates_and_the_clock_are_part_of_it(tmp_path):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    limited = sent(recipe(tmp_path, endless, template_limits=TemplateLimits(seconds=0.01))).load()
    with pytest.raises(Unsupported, match="template-limit"):
        limited.encode(chat())
    dated = "{{ strftime_now('%Y') }}"
    assert len(sent(recipe(tmp_path, dated)).load().encode(chat()).prompts[0]) > 0
    with pytest.raises(Unsupported):
        sent(recipe(tmp_path, dated, local_time=False)).load().encode(chat())


def test_several_share_what_may_be_remembered():
    text = "".join(f"{number} " for number in range(3000))
    small = EncoderRecipe(str(tiny_model_path()), cache_bytes=400_000)
    alone, one_of_many = small.load(), small.load(of=1000)
    for encoder in (alone, one_of_many):
        encoder.encode(chat(text))
    assert alone.encoder.stats.size > one_of_many.encoder.stats.size == 0


def test_files_that_are_missing_are_an_error(tmp_path):
    with pytest.raises(WarmrouteError):
        EncoderRecipe(str(tmp_path)).load()
