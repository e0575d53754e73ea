import platform
import subprocess
import sys

import pytest

# Blocks that Python itself does not pool, and one behind them that keeps the heap from shrinking by itself.
PROGRAM = """
from pathlib import Path
from extproc.adapters.freed_memory import give_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

blocks = [bytes(2000) for _ in range(100_000)]
behind = bytes(2000)
full = resident()
del blocks
kept = resident()
assert give_back()
print(full, kept, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has it")
def test_what_was_freed_is_given_back():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, kept, left = map(int, done.stdout.split())
    assert kept > full - 100_000_000  # else there is nothing to give back
    assert left < full - 150_000_000
