# ruff: noqa: INP001  (a folder of sources with one script, not a package)
"""Regenerate `extproc/pb/` from the `.proto` files here; with `--check`, only compare.

Needs the `dev` extra (grpcio-tools at its pinned version, mypy-protobuf). The folder is mapped to the
import path `extproc/pb`, so that generated modules import each other inside the package.
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "extproc" / "pb"


def generate(out: Path) -> None:
    """Write the generated modules below `out` (as `extproc/pb/…`).

    Raises:
        SystemExit: protoc refused a file; it has printed why.
    """
    sources = sorted(path.name for path in HERE.glob("*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"-Iextproc/pb={HERE}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={Path(sys.executable).parent / 'protoc-gen-mypy'}",
            f"--python_out={out}",
            f"--mypy_out=readable_stubs:{out}",
            *(f"extproc/pb/{name}" for name in sources),
        ]
    )
    if code != 0:
        raise SystemExit(code)


def differences(fresh: Path) -> list[str]:
    """Names of generated files that are missing, outdated or left over in the package."""
    new = {path.name: path.read_bytes() for path in fresh.iterdir()}
    old = {path.name: path.read_bytes() for path in PACKAGE.glob("*_pb2.py*")}
    return sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))


def main() -> int:
    """Exit codes: 0 done, or up to date; 1 `--check` found differences."""
    parser = argparse.ArgumentParser(description="Regenerate extproc/pb from proto/.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if anything would change")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "extproc" / "pb"
        changed = differences(fresh)
        if arguments.check:
            for name in changed:
                print(f"extproc/pb/{name} is out of date: run python proto/generate.py", file=sys.stderr)
            return 1 if changed else 0
        for name in changed:
            target = PACKAGE / name
            source = fresh / name
            if source.exists():
                target.write_bytes(source.read_bytes())
            else:
                target.unlink()
            print(f"extproc/pb/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
