"""A jinja2 sandbox whose templates end: within a time, and without more text than a prompt can have.

jinja2's own sandbox keeps templates from Python's internals and bounds `range`, but a loop in a loop may run
for days, and `"%1000000000d" % 1` takes a gigabyte. Here

- each turn of a loop, and each call of a macro or block, looks at the clock, by what the tree is given; so
  does each item of a filter that makes a list of a list;
- what is printed, and what `+` and `~` make, is measured;
- `*`, `**`, `%`, methods of strings and filters that can make much of little are asked for sizes first.

Nothing is computed differently: a template either renders as it would without guards, or not at all.

What is not guarded: one step over what is large but allowed takes as long as it takes (seconds, for tens of
millions of characters). A list that holds another twice, which holds another twice, and so on, is printed and
compared as the large thing that it looks like: no request can make one, a template's author would have to.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from extproc.prompt.sandbox import PromptSandbox

_DEADLINE = "\0deadline"  # no template can name it
_TICK, _SIZED = "\0tick", "\0sized"
_WIDE = re.compile(r"\d{7,}|\{[^{}]+\{")  # a format with a width of millions, or one that is worked out
_WIDTH_FROM_ARGUMENT = re.compile(r"%[^a-zA-Z%]*\*")
_MOST_BITS = 4096
_MANY = 10_000  # items of a list that is measured when it grows
_ENDLESS = float("inf")
_LISTS = frozenset({list, tuple})
_TOO_MUCH = "the template makes too much text"
_TOO_LONG = "the template runs too long"


class TemplateLimitError(jinja2.TemplateError):
    """A template ran longer, or made more text, than it may."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may take.

    Attributes:
        seconds: by the wall clock; looked at where loops turn.
        characters: printed, or held in one string.
    """

    seconds: float = 1.0
    characters: int = 64 << 20


DEFAULT_LIMITS = TemplateLimits()


class GuardedEnvironment(PromptSandbox):
    """The sandbox. Make templates with `guarded`, and render them with `budget()` among their variables."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(
        self,
        *,
        extensions: Sequence[Any] = (),
        limits: TemplateLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._limits = limits
        self._clock = clock
        most = limits.characters

        def sized(value: Any) -> Any:
            kind = type(value)
            if kind is str:
                if len(value) > most:
                    raise TemplateLimitError(_TOO_MUCH)
            elif kind in _LISTS and len(value) > _MANY:
                _refuse_above(most, _size(value))
            return value

        @jinja2.pass_context
        def tick(context: Context, _: None) -> bool:
            if clock() > context.parent.get(_DEADLINE, _ENDLESS):
                raise TemplateLimitError(_TOO_LONG)
            return True

        self.filters |= {_TICK: tick, _SIZED: sized}
        for name in _ITEM_BY_ITEM:
            self.filters[name] = self._in_time(self.filters[name])
        for name, growth in _FILTERS.items():
            self.filters[name] = _asked_first(self.filters[name], growth, most)
        del self.globals["lipsum"]  # makes as much text as it is asked for

    def guarded(self, source: str) -> jinja2.Template:
        """Compile a template.

        Raises:
            jinja2.TemplateSyntaxError: it is none.
        """
        tree = self.parse(source)
        _Guards().visit(tree)
        tree.set_environment(self)
        template = self.from_string(tree)
        # Copied for each rendering, and a ChainMap is copied key by key.
        template.globals = dict(template.globals)
        return template

    def budget(self) -> Mapping[str, Any]:
        """A variable to render with; good for one rendering."""
        return {_DEADLINE: self._clock() + self._limits.seconds}

    def concat(self, parts: Iterable[str]) -> str:
        """Join what was printed, unless that would be huge."""
        most = self._limits.characters
        kept = []
        length = 0
        for part in parts:
            length += len(part)
            if length > most:
                raise TemplateLimitError(_TOO_MUCH)
            kept.append(part)
        return "".join(kept)

    def written(self, context: Context, pieces: Iterable[str]) -> str:
        """Join what is made bit by bit, unless that takes too long or would be huge."""
        clock, deadline = self._clock, context.parent.get(_DEADLINE, _ENDLESS)

        def in_time() -> Iterator[str]:
            for piece in pieces:
                if clock() > deadline:
                    raise TemplateLimitError(_TOO_LONG)
                yield piece

        return self.concat(in_time())

    def _in_time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that works item by item, which looks at the clock at each."""
        clock = self._clock

        @functools.wraps(function)
        def ticking(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            deadline = context.parent.get(_DEADLINE, _ENDLESS)

            def items() -> Iterator[Any]:
                for item in value:
                    if clock() > deadline:
                        raise TemplateLimitError(_TOO_LONG)
                    yield item

            # They look whether there is anything at all, so what is empty must stay so.
            return function(context, items() if value else value, *args, **kwargs)

        return ticking

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, unless that would be huge."""
        _refuse_above(self._limits.characters, _made_by(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` in the sandbox, without formats that make much of little."""
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _asked_first(wrapped, lambda *_, **__: _width(value.__self__), 0)

    def call(
        __self,  # noqa: N805  # the names leave every keyword to the called object, as in the base class
        __context: Context,  # noqa: PYI063
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call what a template calls, unless that would make a huge string."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            growth = _METHODS.get(__obj.__name__)
            if growth is not None:
                _refuse_above(__self._limits.characters, growth(owner, *args))
        return super().call(__context, __obj, *args, **kwargs)


# --- what the tree is given ------------------------------------------------------------------------------

_WithBody = jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock | jinja2.nodes.Block


class _Guards(NodeTransformer):
    """Puts the guards into a tree."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802  # jinja2's name
        self.generic_visit(node)
        if node.test is not None:
            node.test = jinja2.nodes.And(_filtered(jinja2.nodes.Const(None), _TICK), node.test)
        return self._ticking(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._ticking(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._ticking(node)

    def visit_Block(self, node: jinja2.nodes.Block) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._ticking(node)

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _SIZED)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _SIZED)

    def _ticking(self, node: _WithBody) -> jinja2.nodes.Node:
        tick = jinja2.nodes.ExprStmt(_filtered(jinja2.nodes.Const(None), _TICK))
        node.body = [tick.set_lineno(node.lineno, override=True), *node.body]
        return node


def _filtered(node: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno or 1)


# --- sizes, before anything is made ----------------------------------------------------------------------


def _refuse_above(most: int, size: float) -> None:
    if size > most:
        raise TemplateLimitError(_TOO_MUCH)


def _size(value: Any) -> int:
    """Characters of all texts in a value, about."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) for key, item in value.items())
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 8


def _made_by(operator: str, left: Any, right: Any) -> float:
    if operator == "%":
        return _formatted(left)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return _ENDLESS if bits > _MOST_BITS else 0
    if operator == "*":
        for count, repeated in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(repeated, str | list | tuple):
                return count * _size(repeated)
    return 0


def _formatted(form: Any, *_: Any, **__: Any) -> float:
    if not isinstance(form, str):
        return 0
    return _ENDLESS if _WIDTH_FROM_ARGUMENT.search(form) else _width(form)


def _width(form: str) -> float:
    return _ENDLESS if _WIDE.search(form) else 0


def _padded(text: Any, width: Any = 0, *_: Any, **__: Any) -> float:
    return len(text) + width if isinstance(width, int) and isinstance(text, str) else 0


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> float:
    depth = len(width) if isinstance(width, str) else width
    return (
        len(text) + (text.count("\n") + 1) * depth if isinstance(text, str) and isinstance(depth, int) else 0
    )


def _tabbed(text: str, width: Any = 8) -> float:
    return len(text) + text.count("\t") * width if isinstance(width, int) else 0


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> float:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        return 0
    return len(text) + text.count(old) * len(new)


def _translated(text: str, table: Any = None) -> float:
    values = table.values() if isinstance(table, Mapping) else ()
    return len(text) * max((len(value) for value in values if isinstance(value, str)), default=1)


def _joined_by(separator: str, items: Any = ()) -> float:
    return _joined(items, separator)


def _joined(items: Any, separator: Any = "", *_: Any, **__: Any) -> float:
    if not isinstance(separator, str):
        return 0
    if isinstance(items, list | tuple | str):
        return len(items) * len(separator)
    return _ENDLESS if len(separator) > _MANY else 0


def _filled(items: Any, count: Any = 0, *_: Any, **__: Any) -> float:
    del items
    return 64 * count if isinstance(count, int) else 0


def _wrapped(text: Any, width: Any = 79, long: Any = True, wrap: Any = None, *_: Any, **__: Any) -> float:
    del width, long
    return len(text) * len(wrap) if isinstance(text, str) and isinstance(wrap, str) else 0


_ITEM_BY_ITEM = ("map", "reject", "rejectattr", "select", "selectattr")
Growth = Callable[..., float]
_METHODS: Mapping[str, Growth] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _tabbed,
    "replace": _replaced,
    "translate": _translated,
    "join": _joined_by,
}
_FILTERS: Mapping[str, Growth] = {
    "batch": _filled,
    "center": _padded,
    "format": _formatted,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "slice": _filled,
    "wordwrap": _wrapped,
}


def _asked_first(function: Callable[..., Any], growth: Growth, most: int) -> Callable[..., Any]:
    """`function`, after `growth` was asked. What jinja2 itself passes first is kept from `growth`."""
    extra = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        _refuse_above(most, growth(*args[extra:], **kwargs))
        return function(*args, **kwargs)

    return asked
