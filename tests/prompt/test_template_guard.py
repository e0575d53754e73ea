# ruff: noqa: E501, ISC004  # a template is clearer on one line

import itertools

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.prompt.errors import Unsupported
from extproc.prompt.template import ChatTemplate
from extproc.prompt.template_guard import GuardedEnvironment, TemplateLimitError, TemplateLimits

SMALL = TemplateLimits(seconds=60.0, characters=100_000)

# Templates that would run for hours or fill the memory.
LOOPS = {
    "a loop in a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that takes nothing": "{% for a in range(99999) if false %}{% endfor %}" * 3,
    "macros that call each other twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a recursive loop": (
        "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"
    ),
    "items of a list, made by the way": "{{ ([0] * 9000) | map('string') | map('length') | sum }}",
    "items of which none remains": "{{ ([0] * 9000) | reject('defined') | list }}",
    "items chosen by what they hold": "{{ ([{}] * 9000) | selectattr('a') | list }}",
    "blocks of callers": (
        "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        + "{% call m() %}" * 40
        + "x"
        + "{% endcall %}" * 40
    ),
}
SIZES = {
    "text times a number": "{{ 'x' * 1000000000 }}",
    "a number times text": "{{ 1000000000 * 'x' }}",
    "a list times a number": "{% set x = ['x' * 90000] * 1000000000 %}",
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling a list": (
        "{% set n = namespace(s=['xxxxxxx']) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}"
    ),
    "a power": "{{ 10 ** 100000000 }}",
    "powers of powers": "{{ 9 ** (9 ** 9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a width given": "{{ '%*d' % (1000000000, 1) }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "str.format with a width given": "{{ '{:{}}'.format(1, 1000000000) }}",
    "str.format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'x\\ny' | indent(1000000000) }}",
    "replace": "{% set s = 'x' * 90000 %}{{ s.replace('', s) }}",
    "the filter replace": "{% set s = 'x' * 90000 %}{{ s | replace('x', s) }}",
    "join": "{% set s = 'x' * 90000 %}{{ s.join(s) }}",
    "the filter join": "{% set s = 'x' * 90000 %}{{ range(90000) | list | join(s) }}",
    "join of what is not counted": "{% set s = 'x' * 90000 %}{{ s | map('upper') | join(s) }}",
    "translate": "{% set s = 'x' * 90000 %}{{ s.translate({120: s}) }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "wordwrap": "{% set s = 'x' * 90000 %}{{ s | wordwrap(1, true, s) }}",
    "printing": "{% set s = 'x' * 90000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "printing a list": "{% set s = ['x' * 60000] %}{{ s }}{{ s }}",
    "printing what stands there": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
}


def rendered(source, limits=SMALL, **options):
    environment = GuardedEnvironment(limits=limits, **options)
    return environment.guarded(source).render(**environment.budget())


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS.keys())
def test_a_template_that_runs_on_is_ended(source):
    ticks = itertools.count(0, 0.01)
    with pytest.raises(TemplateLimitError, match="too long"):
        rendered(source, TemplateLimits(seconds=10.0), clock=lambda: next(ticks))


@pytest.mark.parametrize("source", SIZES.values(), ids=SIZES.keys())
def test_a_template_that_makes_too_much_is_ended(source):
    with pytest.raises(TemplateLimitError):
        rendered(source)


def test_each_rendering_has_the_whole_budget():
    environment = GuardedEnvironment(limits=TemplateLimits(characters=1000))
    template = environment.guarded("{% for i in range(9) %}{{ 'x' * 100 }}{% endfor %}")
    for _ in range(5):
        assert len(template.render(**environment.budget())) == 900


def test_a_chat_template_that_reaches_its_limits_is_unsupported():
    template = ChatTemplate("{% for a in range(99999) %}{{ messages }}{% endfor %}", limits=SMALL)
    with pytest.raises(Unsupported) as caught:
        template.render(
            [{"role": "user", "content": "secret" * 100}],
            tools=None,
            documents=None,
            add_generation_prompt=False,
            continue_final_message=False,
            variables={},
        )
    assert caught.value.reason == "template-limit"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (TemplateLimits(seconds=60.0, characters=50_000), "too much"),
        (TemplateLimits(seconds=-1.0), "too long"),
    ],
)
def test_a_deep_value_that_is_indented_is_ended(limits, why):
    """A short request would make a long text of spaces, slowly: each line costs its depth."""
    written = []

    class Counted(list):
        def __iter__(self):
            for item in super().__iter__():
                written.append(item)
                yield item

    tool = {"a": Counted([0] * 100_000)}
    for _ in range(30):
        tool = {"a": tool}
    template = ChatTemplate("{{ tools | tojson(indent=4) }}", limits=limits)
    with pytest.raises(Unsupported, match=why):
        template.render(
            [],
            tools=[tool],
            documents=None,
            add_generation_prompt=False,
            continue_final_message=False,
            variables={},
        )
    assert len(written) < 1000  # it ends there, not when all is made


PIECES = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}:{{ m.role }}{% if loop.last %}!{% endif %}{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for m in messages if m.role == 'nobody' %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for m in messages %}{% if not loop.last %}{{ m.role }}<{{ loop.nextitem.role }}{% endif %}{% endfor %}",
    "{% for m in messages recursive %}{{ m.role }}{% if m.more %}({{ loop(m.more) }}){% endif %}{% endfor %}",
    "{% macro m(x, y='d') %}[{{ x }}{{ y }}{{ varargs }}{{ caller() if caller }}]{% endmacro %}"
    "{{ m(1) }}{{ m('a', y=2) }}{% call m(3) %}inner{% endcall %}",
    "{% set x %}a{{ messages[0].content }}b{% endset %}{{ x ~ x | upper }}",
    "{% filter upper %}abc{{ messages[1].content }}{% endfilter %}",
    "{{ messages | map(attribute='role') | join(', ') }}|{{ 'a-b'.split('-') | join('') }}|{{ ','.join(['x', 'y']) }}",
    "{{ messages[0].content | replace('e', 'EE') }}{{ messages[0].content.replace('l', 'L', 1) }}",
    "{{ 'x' | center(9) }}{{ 'a\\nb' | indent(2, true) }}{{ 'x'.ljust(3) }}{{ '7'.zfill(3) }}{{ 'ab' * 3 }}{{ 2 ** 10 }}",
    "{{ '%s-%03d' % ('a', 7) }}{{ '{}:{:>5}'.format('a', 'b') }}{{ '%s' | format('z') }}{{ 7 % 3 }}{{ 1.5 * 2 }}",
    "{% set n = namespace(s='', l=[]) %}{% for m in messages %}{% set n.s = n.s + m.role %}{% set n.l = n.l + [m.role] %}"
    "{% endfor %}{{ n.s }}{{ n.l }}",
    "{{ nothing }}{{ none }}{{ 1 }}{{ 1.5 }}{{ [1, 'a'] }}{{ {'a': [true]} }}{{ messages[0] }}",
    "{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}{% endfor %}",
    "{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ 'a b c' | wordwrap(1) }}",
    "{{ messages[::-1][0].content }}{{ (messages | list | length) + 1 }}{{ messages[0].content[:2] + 'x' }}",
    "{{ [] | map | list }}{{ nothing | map('upper') | list }}{{ {} | select | list }}{{ 'ab' | reject('equalto', 'a') | list }}",
    "{{ messages[0] | map('upper') | list }}{{ messages | rejectattr('more') | map(attribute='role') | first }}",
    "{% block b %}{{ messages[0].role }}{% endblock %}{{ self.b() }}",
    "{{ '<a>' | e }}{{ 'a' ~ 1 ~ none }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
]
MESSAGES = [
    {"role": "system", "content": "Hello <b>, be good"},
    {"role": "user", "content": "é\n\tx", "more": [{"role": "inner"}]},
    {"role": "assistant", "content": ""},
]


@pytest.mark.parametrize("source", PIECES)
def test_guards_change_nothing(source):
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    guarded = GuardedEnvironment(extensions=[jinja2.ext.loopcontrols])
    expected = plain.from_string(source).render(messages=MESSAGES)
    assert guarded.guarded(source).render(messages=MESSAGES, **guarded.budget()) == expected
