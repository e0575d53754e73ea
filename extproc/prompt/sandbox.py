"""jinja2's immutable sandbox with short ways for what chat templates do most: the same answers, sooner.

The sandbox looks an attribute up as Python would, catches the exception that a message (a dictionary) always
raises, and then asks what kind of object it was. For a conversation of 200 messages that is most of the cost
of rendering. Here the few kinds of objects a template meets are told apart first. Whatever is not surely
allowed and surely the same goes the long way.
"""

from collections.abc import Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_DICT_ATTRIBUTES = frozenset(dir(dict))
# Of exactly these types, since a subclass may do as it likes. Formatting is left out: the sandbox wraps it.
_PLAIN: Mapping[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"},
    LoopContext: frozenset(
        {"depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"}
    ),
}
_METHODS = (MethodType, BuiltinMethodType)


class PromptSandbox(ImmutableSandboxedEnvironment):
    """An `ImmutableSandboxedEnvironment`, faster."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`obj.attribute` in a template."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif attribute in _PLAIN.get(kind, ()):
            return getattr(obj, attribute)
        elif kind is Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, None)
            if value is not None and not isinstance(value, _METHODS):
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063
        """`obj(...)` in a template. The names leave every keyword to the called object, as jinja2's do."""
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)
