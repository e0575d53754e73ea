"""Write the reference of metrics and span attributes from the code's own tables; `--check` only compares."""

import re
import sys
from pathlib import Path

from extproc.adapters.telemetry.attributes import CANDIDATE
from extproc.adapters.telemetry.catalogue import METRICS

DOCUMENT = Path(__file__).parent.parent / "deploy" / "observability.md"
END = "<!-- end -->"


def metrics() -> str:
    """Every metric, as Markdown."""
    lines = ["| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exposed}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |")
    return "\n".join(lines)


def candidate() -> str:
    """What spans say of one candidate, as Markdown."""
    lines = ["| attribute | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in CANDIDATE.items()]
    return "\n".join(lines)


def filled(text: str) -> str:
    """The document with its generated parts made anew.

    Raises:
        SystemExit: a part has no place in it.
    """
    for name, table in (("metrics", metrics()), ("candidate", candidate())):
        start = f"<!-- {name}: generated -->"
        if start not in text:
            sys.exit(f"{DOCUMENT.name} has no line {start!r}")
        made = f"{start}\n{table}\n{END}"
        text = re.sub(
            f"{re.escape(start)}.*?{re.escape(END)}", lambda _, made=made: made, text, flags=re.DOTALL
        )
    return text


def main() -> None:
    """Rewrite or check the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    fresh = filled(text)
    if "--check" in sys.argv:
        if fresh != text:
            sys.exit(f"deploy/{DOCUMENT.name} is old: run `python .ci/metrics_reference.py`")
        return
    DOCUMENT.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
