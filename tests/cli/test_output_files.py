import pytest

from extproc.cli.output_files import check_writable, write_text
from extproc.core.errors import WarmrouteError


def test_text_is_written_to_a_file_or_to_standard_output(tmp_path, capsys):
    path = tmp_path / "x.json"
    check_writable("--json", str(path))
    assert not path.exists()
    write_text(str(path), "résumé \ud800\n")
    assert path.read_text("utf-8") == "résumé ?\n"
    check_writable("--json", "-")
    write_text("-", "figures\n")
    assert capsys.readouterr().out == "figures\n"


@pytest.mark.parametrize(("name", "why"), [("absent/x.json", "no such folder"), (".", "it is a folder")])
def test_what_cannot_be_written_is_said_beforehand(tmp_path, monkeypatch, name, why):
    monkeypatch.chdir(tmp_path)
    check_writable("--json", None)
    check_writable("--json", "x.json")
    with pytest.raises(WarmrouteError, match=f"cannot write --json {name}: .*{why}"):
        check_writable("--json", name)
    with pytest.raises(WarmrouteError, match=f"cannot write {name}"):
        write_text(name, "")
