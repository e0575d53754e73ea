"""What somebody meant who wrote a setting that does not exist."""

import difflib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

_ALIKE = 0.7
_REFERENCE = "all settings: deploy/configuration.md"


def meant(root: type[BaseModel], where: Sequence[int | str]) -> str:
    """A hint: a setting with a similar name in the same section, or where the setting of that name belongs.

    Args:
        root: the outermost section.
        where: the setting that does not exist, as pydantic says it.
    """
    *section, name = (str(part) for part in where if not isinstance(part, int))
    known = list(_settings(root, ()))
    here = [setting[-1] for setting in known if _same(setting[:-1], section)]
    alike = difflib.get_close_matches(name, here, 1, _ALIKE)
    if alike:
        return f"did you mean `{alike[0]}`?"
    elsewhere = [".".join(setting) for setting in known if setting[-1] == name]
    return f"did you mean `{elsewhere[0]}`?" if len(elsewhere) == 1 else _REFERENCE


def _same(section: Sequence[str], given: Sequence[str]) -> bool:
    return len(section) == len(given) and all(
        one in ("*", other) for one, other in zip(section, given, strict=True)
    )


def _settings(model: type[BaseModel], outer: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every setting by the names that lead to it; `*` stands for a key that users choose."""
    for name, field in model.model_fields.items():
        yield (*outer, name)
        inner = _section(field.annotation)
        if inner is not None:
            chosen = ("*",) if typing.get_origin(field.annotation) is dict else ()
            yield from _settings(inner, (*outer, name, *chosen))


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section(part) for part in typing.get_args(annotation))
    return next((part for part in found if part is not None), None)
