import itertools
import json
from types import MappingProxyType

import jinja2
import jinja2.ext
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Undefined
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from extproc.prompt.sandbox import PromptSandbox
from extproc.prompt.tiny import tiny_model_path
from tests.support.models import PARTS_TEMPLATE
from tests.support.prompt_cases import WEATHER, assistant, call, system, text, tool_result, user


class Text(str):
    __slots__ = ()


class Fields(dict):
    hidden = "x"


def loop_context():
    loop = LoopContext([1, 2, 3], Undefined)
    next(loop)
    return loop


OBJECTS = [
    {},
    {"role": "user", "items": 1, "_x": 2, "__class__": 3, "format": "f"},
    Fields(role="user"),
    "text",
    Text("text"),
    b"bytes",
    [1],
    {1},
    3,
    None,
    True,
    MappingProxyType({"role": 1}),
    Namespace(role="user", _x=1, f="{}".format, upper="x".upper, none=None),
    loop_context(),
    Undefined(name="u"),
    len,
]
ATTRIBUTES = sorted(
    {name for thing in OBJECTS for name in dir(type(thing))}
    | {"role", "f", "_x", "none", "hidden", "nothing", "unsafe_callable", "mro", "gi_frame"}
)


def outcome(look):
    """What a template would see: a value, what kind of undefined, or an error."""
    try:
        value = look()
    except Exception as error:
        return type(error), str(error)
    if isinstance(value, Undefined):
        try:
            str(value + "")
        except jinja2.TemplateError as error:
            return type(value), type(error), str(error)
    if callable(value):
        return "callable", type(value), getattr(value, "__name__", None)
    return type(value), repr(value)


@pytest.mark.parametrize("at", range(len(OBJECTS)))
def test_every_attribute_of_every_kind_of_object_is_what_jinja_says(at):
    ours, theirs = PromptSandbox(), ImmutableSandboxedEnvironment()
    for name in ATTRIBUTES:
        one = outcome(lambda name=name: ours.getattr(OBJECTS[at], name))
        assert one == outcome(lambda name=name: theirs.getattr(OBJECTS[at], name)), name


@pytest.mark.parametrize(
    "source",
    [
        "{{ s.format(x=1) }}{{ s.format_map({'x': 2}) }}",
        "{{ s.format.__self__ }}",
        "{{ s.__class__.__mro__ }}",
        "{{ '{0.__class__}'.format(s) }}",
        "{{ '{x.__class__.__init__.__globals__}'.format_map({'x': s}) }}",
        "{% set ns = namespace(f=s.format) %}{{ ns.f(x=3) }}",
        "{{ m.items() | list }}{{ m.get('role') }}{{ m.pop('role') }}",
        "{{ m.update({'a': 1}) }}",
        "{{ l.append(1) }}",
        "{{ m.__init__.__globals__ }}",
        "{{ namespace.__init__ }}{{ cycler }}",
        "{% for x in l %}{{ loop.index }}{{ loop.previtem }}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{% for x in l %}{{ loop.changed(x) }}{{ loop.length }}{{ loop.last }}{% endfor %}",
        "{% for x in l %}{{ loop.__class__ }}{{ loop._iterable }}{% endfor %}",
        "{{ s.split('e')[-1].lstrip('x').upper() }}{{ ','.join(l) }}{{ s.startswith(('t',)) }}",
        "{{ s.startswith() }}",
        "{{ s.encode('nope') }}",
        "{{ s.nothing }}{{ s.nothing.more }}",
        "{{ m.nothing.more }}",
        "{% macro f(x) %}[{{ x }}{{ caller is defined }}]{% endmacro %}{{ f.name }}{{ f(x=1) }}",
        "{% macro f() %}{% endmacro %}{{ f.__class__ }}",
        "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{{ ns.b }}",
        "{% set ns = namespace(a=1) %}{{ ns._Namespace__attrs }}",
        "{{ self.x }}{{ range(3).start }}",
        "{{ m['role'].upper() }}{{ m['format'] }}{{ s['upper']() }}{{ s['__class__'] }}",
    ],
)
def test_templates_that_try_something_see_the_same(source):
    def tried(kind):
        variables = {"s": "text {x}", "m": {"role": "user"}, "l": ["a", "b"]}
        try:
            return kind().from_string(source).render(variables)
        except Exception as error:
            return type(error), str(error)

    assert tried(PromptSandbox) == tried(ImmutableSandboxedEnvironment)


PROMPTS = [
    json.loads((tiny_model_path() / "tokenizer_config.json").read_text())["chat_template"],
    PARTS_TEMPLATE.replace('{{ strftime_now("%Y-%m-%d") }}', "").replace(
        "{% generation %}{% endgeneration %}", ""
    ),
]
contents = st.sampled_from(["", "x", "<think>a</think>b", "{0}", "\n\n"]) | st.text(max_size=8)
messages = st.lists(
    st.one_of(
        contents.map(user),
        contents.map(assistant),
        contents.map(system),
        contents.map(lambda value: tool_result("c1", value)),
        contents.map(lambda value: user([text(value)])),
        st.just(
            {
                **assistant(""),
                "tool_calls": [{**call("c1", "f", ""), "function": {"name": "f", "arguments": {"a": [1]}}}],
            }
        ),
        st.just({**assistant("a"), "reasoning_content": "hm"}),
    ),
    max_size=6,
)


@given(messages, st.booleans(), st.sampled_from([None, [WEATHER]]))
def test_conversations_render_as_in_jinjas_own_sandbox(given_messages, generation, tools):
    for source in PROMPTS:
        seen = []
        for kind in (PromptSandbox, ImmutableSandboxedEnvironment):
            environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
            try:
                seen.append(
                    environment.from_string(source).render(
                        messages=given_messages,
                        tools=tools,
                        add_generation_prompt=generation,
                    )
                )
            except Exception as error:
                seen.append((type(error), str(error)))
        one, other = seen
        assert one == other


def test_every_object_is_tried():
    kinds = [type(thing) for thing in OBJECTS]
    assert all(one is not other for one, other in itertools.pairwise(kinds) if one is not dict)
