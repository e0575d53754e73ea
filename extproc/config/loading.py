"""From a file to a `Config`, or to errors that name line and fix."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from extproc.config.base import ConfigError
from extproc.config.references import problems_of
from extproc.config.root import Config
from extproc.config.spelling import meant


def load(path: Path | str, *, secrets: bool = True) -> Config:
    """Read and validate a configuration file. Relative paths in it are relative to the file.

    Without `secrets`, keys need not be where the file says they are (on another machine, for instance).

    Raises:
        ConfigError: naming the file, the line, the field and what is wrong with it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: byte {error.start} cannot be read; save it as UTF-8"
        ) from error
    return parse(text, str(path), base=path.parent, secrets=secrets)


def parse(text: str, name: str = "config", base: Path | None = None, *, secrets: bool = True) -> Config:
    """Validate configuration text; `name` is what errors call it.

    Raises:
        ConfigError: see `load`.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
        repeated = list(_repeated(node))
        given = data if base is None else _absolute(data, base)
    except _UNREADABLE as error:
        raise ConfigError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{name} must be a mapping with at least `pools:`")
    if repeated:
        raise _unusable(name, repeated)
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        problems = [_describe(node, problem) for problem in error.errors()]
        raise _unusable(name, problems) from error
    contradictions = [_located(node, where, what) for where, what in problems_of(config, secrets=secrets)]
    if contradictions:
        raise _unusable(name, contradictions)
    return config


# Besides its own errors, PyYAML lets through those of the types it makes: a date that is none, for instance.
_UNREADABLE = (yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError)
# Not those of `router_tls`: they are where Envoy is.
_PATH_FIELDS = {
    ("model", "path"),
    ("model", "chat_template"),
    ("revisions", "path"),
    ("revisions", "chat_template"),
    ("discovery", "file"),
    ("kubernetes", "kubeconfig"),
    ("envoy", "eds_file"),
    ("tls", "certificate"),
    ("tls", "key"),
    ("tls", "client_ca"),
    ("tls", "ca"),
    ("peers", "token_file"),
    ("pools", "api_key_file"),
    ("snapshot", "path"),
    ("decision_log", "path"),
    ("salt_key", "file"),
    ("admin", "token_file"),
    ("journal", "path"),
}


_MERGE = "tag:yaml.org,2002:merge"
_NO_PATHS = ("", "-")  # nothing, and standard output


def _absolute(data: Any, base: Path, section: str = "") -> Any:
    if isinstance(data, list):
        return [_absolute(item, base, section) for item in data]
    if not isinstance(data, dict):
        return data
    out = {}
    for key, value in data.items():
        if (section, key) in _PATH_FIELDS and isinstance(value, str) and value not in _NO_PATHS:
            out[key] = str((base / value).resolve())
        else:
            out[key] = _absolute(value, base, str(key))
    return out


def _repeated(node: yaml.Node | None) -> Iterator[str]:
    """Settings that stand twice in one mapping: YAML lets the last one count, and nobody means that."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key.value, str) and key.tag != _MERGE:
                if key.value in seen:
                    yield f"line {line}: {key.value}: set twice, first in line {seen[key.value]}; remove one"
                seen.setdefault(key.value, line)
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated(item)


def _describe(node: yaml.Node | None, problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = f"no such setting; {meant(Config, problem['loc'])}"
    elif problem["type"] == "missing":
        message = "this setting is required"
    return _located(node, problem["loc"], message)


def _located(node: yaml.Node | None, where: tuple[int | str, ...], message: str) -> str:
    field = ".".join(str(part) for part in where) or "(top level)"
    return f"line {_line(node, where)}: {field}: {message}"


def _unusable(name: str, problems: list[str]) -> ConfigError:
    return ConfigError("\n".join([f"{name} is not usable:", *(f"  {problem}" for problem in problems)]))


def _line(node: yaml.Node | None, where: tuple[int | str, ...]) -> int:
    """Line of the deepest part of `where` that is in the file."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in where:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
