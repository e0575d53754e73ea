"""Memory that a process has freed and its C library keeps, given back to the machine.

Reading a tokenizer takes 100 to 200 MB that are never needed again, and glibc keeps most of them for later.
"""

import ctypes
import gc


def give_back() -> bool:
    """Give it back; False where the C library has no such call (macOS, musl)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
