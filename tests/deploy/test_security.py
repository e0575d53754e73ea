"""The audit in deploy/security.md: each line names tests that exist, and settings that do."""

import re
from pathlib import Path

from extproc.config import Config
from extproc.config.base import Section

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "deploy" / "security.md").read_text()
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
SECTIONS = ("limits", "admin", "tls", "scrape", "decision_log", "envoy", "admission", "peers", "kv_events")
WITHOUT_TESTS = {"a version with a known vulnerability"}  # its answer is somebody else's


def lines():
    """(what, cells) of every line with tests."""
    inside = False
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| what |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            yield cells[0], line


def test_every_line_names_tests_that_exist():
    missing, without = [], []
    found = list(lines())
    for what, line in found:
        named = TEST.findall(line)
        if not named and what not in WITHOUT_TESTS:
            without.append(what)
        for file, name in named:
            path = ROOT / "tests" / file
            if not path.exists() or not re.search(rf"\bdef {name}\(", path.read_text()):
                missing.append(f"{what}: {file}::{name}")
    assert len(found) > 50
    assert not without
    assert not missing, "\n".join(missing)


def test_settings_that_are_named_exist():
    named = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.\w+)`", TEXT))
    unknown = []
    for setting in named:
        section, name = setting.split(".")
        fields = Config.model_fields
        if section == "kv_events":
            continue  # of a pool
        model = next(
            part
            for part in (fields[section].annotation, *getattr(fields[section].annotation, "__args__", ()))
            if isinstance(part, type) and issubclass(part, Section)
        )
        if name not in model.model_fields:
            unknown.append(setting)
    assert len(named) > 15
    assert not unknown


def test_defaults_are_those_of_the_configuration():
    given = {
        "limits.body_bytes": "64 MiB",
        "limits.read_bytes": "16 MiB",
        "limits.json_values": "262,144",
        "limits.messages": "10,000",
        "limits.prompts": "2,048",
        "limits.prompt_budget_ms": "250",
        "limits.template_ms": "1000",
        "limits.headers": "1000",
        "limits.header_bytes": "1 MiB",
        "limits.streams": "10,000",
        "limits.lease_expiry_s": "1800",
    }
    limits = Config.model_fields["limits"].default_factory()
    for setting, said in given.items():
        assert f"`{setting}`, {said}" in TEXT, setting
        number = float(said.split()[0].replace(",", "")) * (1 << 20 if "MiB" in said else 1)
        assert getattr(limits, setting.split(".")[1]) == number, setting
