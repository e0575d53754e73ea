"""Does a chat template loop over a message's content, or print it? vLLM's rule, on the template's AST.

A template that iterates over `message.content` is given the list of parts ("openai"); any other is given one
string ("string"). The engine decides by names alone, without scopes, so we must be wrong where it is wrong.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]


class _UnexpectedTargetError(Exception):
    """A loop or an assignment unpacks what should be one name: the engine gives up and says "string"."""


def detect_content_format(root: nodes.Template) -> ContentFormat:
    """The content format of a parsed chat template."""
    try:
        return "openai" if any(_content_loops(root)) else "string"
    except _UnexpectedTargetError:
        return "string"


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _is_attribute(node: nodes.Node, name: str, key: str) -> bool:
    """`name.key` or `name["key"]`."""
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is_name(node.node, name) and node.attr == key


def _reads(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable (or its `key`), seen through filters, tests and slices."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _reads(node.node, name, key)
    if isinstance(node, nodes.Test):
        return _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    return _is_name(node, name) if key is None else _is_attribute(node, name, key)


def _target_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnexpectedTargetError
    return target.name


def _aliases(root: nodes.Template, name: str) -> list[str]:
    """`name` and every variable it is assigned to, directly or over others."""
    found = [name]
    for current in found:  # grows while we walk it
        for assign in root.find_all(nodes.Assign):
            if _reads(assign.node, current):
                target = _target_name(assign.target)
                if target not in found:
                    found.append(target)
    return found


def _loop_variables(root: nodes.Template, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [
        _target_name(loop.target)
        for loop in root.find_all(nodes.For)
        if any(_reads(loop.iter, name) for name in names)
    ]


def _content_parameters(root: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Parameters of a macro that are given a message's content somewhere."""
    declared = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in root.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(declared, call.args, strict=False)]
        given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in declared]
        found.update(
            name for name, value in given if any(_reads(value, message, "content") for message in messages)
        )
    return found


def _content_loops(root: nodes.Template) -> Iterator[bool]:
    """One true item for each loop over a message's content."""
    messages = _loop_variables(root, _aliases(root, "messages"))
    parameters_at: dict[int, set[str]] = {}
    inside_macros: set[int] = set()
    for macro in root.find_all(nodes.Macro):
        parameters = _content_parameters(root, macro, messages)
        for loop in macro.find_all(nodes.For):
            inside_macros.add(id(loop))
            if parameters:
                parameters_at[id(loop)] = parameters
    for loop in root.find_all(nodes.For):
        over_content = any(_reads(loop.iter, message, "content") for message in messages)
        if not over_content and isinstance(loop.iter, nodes.Name):
            name = loop.iter.name
            over_content = name in parameters_at.get(id(loop), ()) or (
                name == "content" and id(loop) not in inside_macros
            )
        if over_content:
            _target_name(loop.target)
            yield True
