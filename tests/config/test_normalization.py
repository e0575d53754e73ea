import pytest

from extproc.config import ConfigError, parse
from extproc.prompt.normalize import NormalizationMode, NormalizationRules
from extproc.prompt.normalize_text import TextRules

POOL = """
pools:
  - discovery: {static: ["10.0.0.1:8000"]}
    normalization:
"""


def pool(*lines):
    return parse(POOL + "".join(f"      {line}\n" for line in lines)).pools[0].normalization


def test_it_is_opt_in():
    section = parse('pools: [{discovery: {static: ["10.0.0.1:8000"]}}]').pools[0].normalization
    assert section.mode is NormalizationMode.DISABLED
    assert section.rules() == NormalizationRules()


def test_every_rule_can_be_chosen():
    section = pool(
        "mode: dry-run",
        "line_ends: false",
        "unicode: false",
        "trailing_spaces: false",
        "tool_key_order: false",
        "fragment_tag: document",
        'volatile_lines: ["Current date:", " Trace: "]',
        'stable_end: "=== end ==="',
        "max_body_bytes: 1000",
    )
    assert section.mode is NormalizationMode.DRY_RUN
    text = TextRules(
        line_ends=False,
        unicode=False,
        trailing_spaces=False,
        fragment_tag="document",
        volatile_lines=("Current date:", "Trace:"),
        stable_end="=== end ===",
    )
    assert section.rules() == NormalizationRules(text, tool_key_order=False, max_body_bytes=1000)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("mode: always", "mode"),
        ('fragment_tag: "<document>"', "fragment_tag"),
        ('volatile_lines: [" "]', "volatile_lines.0"),
        ('stable_end: "a\\nb"', "stable_end"),
        ("max_body_bytes: 0", "max_body_bytes"),
        ("key_order: true", "key_order"),
    ],
)
def test_mistakes_are_named_with_their_line(line, field):
    with pytest.raises(ConfigError, match=rf"line 5: pools\.0\.normalization\.{field}"):
        pool(line)
