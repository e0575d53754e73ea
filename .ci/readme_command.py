"""Print the Nth shell block of the README (1-based): so that what is tested is what is promised."""

import re
import sys
from pathlib import Path

blocks = re.findall(
    r"```(?:bash|sh|shell|console)\n(.*?)```", Path("README.md").read_text("utf-8"), re.DOTALL
)
wanted = int(sys.argv[1])
if len(blocks) < wanted:
    sys.exit(f"README.md has {len(blocks)} shell blocks, block {wanted} was asked for")
print("\n".join(line.removeprefix("$ ") for line in blocks[wanted - 1].splitlines()))
