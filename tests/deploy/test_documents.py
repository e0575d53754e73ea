"""What documents lead to is there: files, and headings in them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "deploy/", "envoy/", "loadtests/", "proto/", "extproc/", "tests/")
DOCUMENTS = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).glob("**/*.md" if folder else "*.md")
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(document):
    """Names of its headings, as GitHub makes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", document.read_text())
    heads = re.findall(r"(?m)^#+ (.+)$", text)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    lost = []
    for path, anchor in LINK.findall(re.sub(r"(?ms)^```.*?^```", "", document.read_text())):
        target = (document.parent / path) if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(f"{path}#{anchor}" if anchor else path)
    assert lost == []


def test_every_document_is_looked_at():
    assert ROOT / "README.md" in DOCUMENTS
    assert ROOT / "deploy" / "configuration.md" in DOCUMENTS


def test_the_commands_in_the_readme_are_all_there_are():
    from extproc.cli import COMMANDS

    rows = re.findall(r"(?m)^\| `warmroute ([a-z-]+)", (ROOT / "README.md").read_text())
    assert rows == list(COMMANDS)
