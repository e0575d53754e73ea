"""What parts of the file say about each other: names that must exist, be unique, or lead somewhere."""

from collections.abc import Iterator
from typing import TypeAlias

from extproc.config.root import Config

Problem: TypeAlias = tuple[tuple[int | str, ...], str]
"""Where in the file, and what to do about it."""


def problems_of(config: Config) -> Iterator[Problem]:
    """Contradictions of a configuration whose sections are each valid."""
    yield from _pools(config)


def _pools(config: Config) -> Iterator[Problem]:
    names = [pool.name for pool in config.pools]
    owners: dict[str, str] = {}
    for position, pool in enumerate(config.pools):
        if pool.name in names[:position]:
            yield ("pools", position, "name"), f"pool names must differ, got {', '.join(names)}"
        for at, model in enumerate(pool.model.names):
            if owners.setdefault(model, pool.name) != pool.name:
                where = ("pools", position, "model", "names", at)
                yield where, f"model {model!r} is in two pools: {owners[model]} and {pool.name}"
