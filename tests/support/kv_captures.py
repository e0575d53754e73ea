"""The recordings of `tests/data/vllm`."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "data" / "vllm"
RECORDINGS = sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))
WIRE: dict[str, dict[str, tuple[int, int]]] = json.loads((FOLDER / "wire_index.json").read_text())


def wire(version: str, item: str) -> bytes:
    """One message as that vLLM version encodes it."""
    offset, length = WIRE[version][item]
    return (FOLDER / f"wire_{version}.bin").read_bytes()[offset : offset + length]


def recorded(name: str) -> Iterator[tuple[int, bytes]]:
    """Number and payload of every message of a recording; an end marker has number -1."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt") as lines:
        for line in lines:
            frames = [bytes.fromhex(frame) for frame in json.loads(line)["frames"]]
            yield int.from_bytes(frames[-2], "big", signed=True), frames[-1]


def payloads(name: str) -> list[bytes]:
    """The payloads of a recording, without end markers."""
    return [payload for seq, payload in recorded(name) if seq >= 0]
