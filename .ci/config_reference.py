"""Write the configuration reference from the settings' own definitions; `--check` only compares."""

import re
import sys
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from extproc.config import Config

START, END = "<!-- configuration: generated -->", "<!-- end -->"


def rows(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str, str]]:
    """(setting, default, meaning), nested sections in dotted form."""
    out: list[tuple[str, str, str]] = []
    for name, field in model.model_fields.items():
        inner = section(field.annotation)
        kind = typing.get_origin(field.annotation)
        many = "[]" if kind is list else ".*" if kind is dict else ""
        path = f"{prefix}{name}{many if inner else ''}"
        if inner is not None:
            summary = (inner.__doc__ or "").strip().splitlines()[0]
            out.append((path, "required" if field.is_required() else "", f"**{summary}**"))
            out += rows(inner, f"{path}.")
        else:
            out.append((path, default(field), field.description or ""))
    return out


def section(annotation: Any) -> type[BaseModel] | None:
    """The settings class inside an annotation, if there is one."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def default(field: Any) -> str:
    """The default as a user would write it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (list, dict)):
        return "empty" if not value else f"`{value}`"
    return f"`{value}`" if value != "" else "empty"


def table() -> str:
    """The reference as Markdown."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {default} | {meaning} |" for name, default, meaning in rows(Config)]
    return "\n".join(lines)


def main() -> None:
    """Rewrite or check the reference."""
    document = Path(__file__).parent.parent / "deploy" / "configuration.md"
    text = document.read_text(encoding="utf-8")
    fresh = re.sub(
        f"{re.escape(START)}.*?{re.escape(END)}",
        lambda _: f"{START}\n{table()}\n{END}",
        text,
        flags=re.DOTALL,
    )
    if START not in text:
        sys.exit(f"{document.name} has no line {START!r}")
    if "--check" in sys.argv:
        if fresh != text:
            sys.exit("deploy/configuration.md is old: run `python .ci/config_reference.py`")
        return
    document.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
