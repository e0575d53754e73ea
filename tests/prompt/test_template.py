from datetime import datetime

import pytest

from extproc.prompt.errors import Unsupported
from extproc.prompt.template import ChatTemplate

SYSTEM_FIRST = """\
{% for m in messages %}
{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}
{% endfor %}"""
EACH = "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}"


def render(source, *messages, clock=None, **options):
    defaults = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        "continue_final_message": False,
        "variables": {},
    }
    conversation = [{"role": role, "content": content} for role, content in messages]
    return ChatTemplate(source, clock=clock).render(conversation, **{**defaults, **options})


def reason(source, *messages, **options):
    with pytest.raises(Unsupported) as caught:
        render(source, *messages, **options)
    return caught.value.reason


def test_json_keeps_order_and_does_not_escape():
    source = "{{ tools | tojson }}|{{ tools | tojson(indent=1, sort_keys=true) }}"
    rendered = render(source, ("user", "x"), tools=[{"z": "<é>", "a": 1}])
    assert rendered == '[{"z": "<é>", "a": 1}]|[\n {\n  "a": 1,\n  "z": "<é>"\n }\n]'


def test_blocks_leave_no_white_space():
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}") == "x\n"


def test_the_date_comes_from_the_clock_that_was_given():
    source = "{{ strftime_now('%d %b %Y') }}"
    assert render(source, clock=lambda: datetime(2024, 7, 26)) == "26 Jul 2024"  # noqa: DTZ001
    assert reason(source) == "template-clock"
    assert ChatTemplate(source).volatile
    assert not ChatTemplate(EACH).volatile


def test_generation_blocks_and_loop_controls_are_understood():
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert render(source, ("user", "a"), ("user", "b")) == "a"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include 'x' %}",
    ],
)
def test_a_template_that_fails_is_unsupported(source):
    assert reason(source, ("user", "x")) == "template-error"


def test_what_is_no_template_is_unsupported():
    with pytest.raises(Unsupported, match="template-syntax"):
        ChatTemplate("{% for %}")


def test_recursion_is_unsupported():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert reason("{{ tools | tojson }}", ("user", "x"), tools=deep) == "too-deep"


def test_continuing_cuts_where_the_message_ends():
    options = {"continue_final_message": True}
    assert render(EACH, ("user", "a"), ("assistant", "b "), **options) == "<user:a><assistant:b "
    trimmed = EACH.replace("m.content", "m.content | trim")
    assert render(trimmed, ("user", "a"), ("assistant", "b "), **options) == "<user:a><assistant:b"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}", [("user", "a"), ("assistant", "b")]),
        (EACH, [("user", [])]),
        (EACH, [("user", [{"type": "image"}])]),
        (EACH, []),
        (EACH.replace("m.content", "m['con' ~ 'tent'][:1]"), [("user", "abc")]),
    ],
)
def test_what_cannot_be_continued_is_unsupported(source, messages):
    assert reason(source, *messages, continue_final_message=True) == "template-error"


def test_developers_become_systems_where_the_template_does_not_know_them():
    late = [("user", "u"), ("developer", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    assert render(EACH, ("system", "s"), *late) == "<system:s\n\na\nb><user:u>"
    assert render(EACH, ("developer", "d"), ("user", "u")) == "<system:d><user:u>"
    knowing = EACH + "{# 'developer' #}"
    assert render(knowing, ("system", "s"), ("developer", "d")) == "<system:s><developer:d>"


def test_systems_stay_apart_without_developers():
    assert render(EACH, ("system", "a"), ("user", "u"), ("system", "b")) == "<system:a><user:u><system:b>"


@pytest.mark.parametrize(
    ("source", "merges"),
    [
        (EACH, False),
        (SYSTEM_FIRST, True),
        ("{{ strftime_now('%Y') }}", True),
        ("{% generation %}{% endgeneration %}", True),
    ],
)
def test_templates_that_refuse_late_systems_are_recognised(source, merges):
    assert ChatTemplate(source).needs_leading_system() is merges
