import pytest
from jinja2 import Environment

from extproc.prompt.content_format import detect_content_format

LOOP = "{% for m in messages %}{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}"


def detect(source):
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701  # prompts are not HTML
    return detect_content_format(environment.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        LOOP.replace("m.content", "m['content']"),
        LOOP.replace("m.content", "m.content[1:]"),
        LOOP.replace("m.content", "m.content | reverse"),
        LOOP.replace("in messages", "in messages[1:]"),
        "{% set rest = messages %}{% set more = rest %}" + LOOP.replace("in messages", "in more"),
        "{% set messages = messages[1:] %}" + LOOP,
        "{% for m in messages %}{% set content = m.content %}{% for p in content %}x{% endfor %}{% endfor %}",
        (
            "{% macro show(body) %}{% for p in body %}x{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
        ),
        (
            "{% macro show(a, body) %}{% for p in body %}x{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(1, body=m.content) }}{% endfor %}"
        ),
    ],
)
def test_templates_that_loop_over_content_get_its_parts(source):
    assert detect(source) == "openai"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for call in m.tool_calls %}x{% endfor %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for k, v in m.content.items() %}x{% endfor %}{% endfor %}",
        "{% macro show(content) %}{% for p in content %}x{% endfor %}{% endmacro %}",
        "{% for m in others %}{% for part in m.content %}x{% endfor %}{% endfor %}",
        "{% for a, b in messages %}x{% endfor %}" + LOOP,
        LOOP.replace("part in", "a, b in"),
        "{% set a = b %}{% set b = a %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% set a, b = messages %}{{ a }}",
    ],
)
def test_all_others_get_text(source):
    assert detect(source) == "string"
