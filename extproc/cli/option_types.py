"""What options of all commands have in common: types that say what they want, help that says defaults."""

import argparse
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def checked(
    kind: Callable[[str], _Value], holds: Callable[[_Value], bool], wanted: str
) -> Callable[[str], _Value]:
    """Type of an option: what `kind` makes of a text, if that `holds`; else the error tells the `wanted`."""

    def parse(text: str) -> _Value:
        try:
            value = kind(text)
        except ValueError:
            pass
        else:
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


def listed(
    kind: Callable[[str], _Value], holds: Callable[[_Value], bool], wanted: str
) -> Callable[[str], list[_Value]]:
    """The same for several values, with commas between them."""
    return checked(
        lambda text: [kind(part) for part in text.split(",")],
        lambda values: all(holds(value) for value in values),
        f"a list, with commas, of {wanted}",
    )


whole = checked(int, lambda value: value > 0, "a whole number above 0")
"""Type of an option that counts something there has to be."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults where there are any and the text does not tell them itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or default == [] or "default" in (action.help or ""):
            return action.help
        if isinstance(default, list):
            return f"{action.help} (default: {','.join(map(str, default))})"
        return super()._get_help_string(action)
