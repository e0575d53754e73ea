import argparse

import pytest

from extproc.cli import COMMANDS, main
from extproc.cli.option_types import HelpFormatter, checked, listed


@pytest.mark.parametrize("text", ["", "x", "0", "1.5"])
def test_what_is_none_of_what_is_wanted_is_said_with_what_is(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a whole number above 0"):
        checked(int, lambda value: value > 0, "a whole number above 0")(text)


def test_a_list_is_as_good_as_its_worst_member():
    read = listed(float, lambda value: value > 0, "numbers above 0")
    assert read("1,2.5") == [1.0, 2.5]
    for text in ("", "1,", "1,0", "1;2"):
        with pytest.raises(argparse.ArgumentTypeError, match="a list, with commas, of numbers above 0"):
            read(text)


def test_help_says_the_defaults_there_are_and_each_once():
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    parser.add_argument("--nothing", help="none")
    parser.add_argument("--flag", action="store_true", help="off")
    parser.add_argument("--number", default=0, help="zero")
    parser.add_argument("--numbers", default=[2, 4], help="several")
    parser.add_argument("--told", default=5, help="told (default: by size)")
    lines = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    assert "--nothing NOTHING none" in lines
    assert "--flag off" in lines
    assert "--number NUMBER zero (default: 0)" in lines
    assert "--numbers NUMBERS several (default: 2,4)" in lines
    assert "--told TOLD told (default: by size)" in lines


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_tells_of_defaults_that_are_none(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for odd in ("(default: None)", "(default: False)", "(default: [", ") (default"):
        assert odd not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "-c", "x", "--processes", "many"),
        ("top", "--interval", "soon"),
        ("engine", "--port", "http"),
        ("engine", "--block-size", "x"),
        ("analyze", "--replicas", "2,few", "log"),
        ("simulate", "--rate", "fast"),
        ("simulate", "--limit", "0"),
        ("simulate", "--jobs", "-1"),
    ],
)
def test_a_value_that_is_none_is_reported_by_what_is_wanted(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert " is not a " in said
    assert "invalid" not in said
