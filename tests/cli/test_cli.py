import subprocess
import sys

import pytest

from extproc import __version__
from extproc.cli import COMMANDS, main


def warmroute(*arguments):
    command = [sys.executable, "-m", "extproc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def exit_code(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_as_a_module_it_says_its_version():
    done = warmroute("--version")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, f"warmroute {__version__}", "")


def test_help_names_every_command_with_what_it_does(capsys):
    assert exit_code("--help") == 0
    out = capsys.readouterr().out
    for command in ("serve", "check", "envoy-config", "demo", "engine"):
        assert command in COMMANDS
        assert f"    {command}" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_says_defaults(command, capsys):
    assert exit_code(command, "--help") == 0
    out = capsys.readouterr().out
    assert f"usage: warmroute {command}" in out
    assert "--" in out


def test_no_command_an_unknown_one_and_a_wrong_option_are_usage_errors(capsys):
    for arguments in ((), ("fly",), ("serve", "--fly"), ("serve",)):
        assert exit_code(*arguments) == 2
        assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "check", "envoy-config"])
def test_a_mistake_in_the_configuration_is_exit_code_2_with_its_line(command, tmp_path, capsys):
    path = tmp_path / "warmroute.yaml"
    path.write_text("pools:\n  - discovery:\n      static: [10.0.0.1:8000]\n    block_sizes: 16\n")
    assert main([command, "-c", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"warmroute {command}: ")
    assert "line 4: pools.0.block_sizes: no such setting" in err
    assert "Traceback" not in err
    path.write_text("pools: [")
    assert main([command, "-c", str(path)]) == 2
    assert "not valid YAML" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch):
    def interrupted(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("extproc.cli.check.run", interrupted)
    assert main(["check", "-c", "x"]) == 130
