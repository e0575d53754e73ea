"""Guided by coverage, with atheris (`pip install atheris`): `python -m tests.fuzz TARGET [option...]`."""

import contextlib
import importlib
import sys

import hypothesis


def main() -> int:
    """Fuzz one target until it fails or is interrupted."""
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        atheris = None
    guide = contextlib.nullcontext() if atheris is None else atheris.instrument_imports(include=["extproc"])
    with guide:
        targets = importlib.import_module("tests.fuzz.targets").TARGETS
    if len(sys.argv) < 2 or sys.argv[1] not in targets:
        print(__doc__, f"Targets: {', '.join(targets)}", sep="\n")
        return 2
    if atheris is None:
        print("atheris is not installed; without it: WARMROUTE_FUZZ_SECONDS=60 python -m pytest tests/fuzz")
        return 2
    target = targets[sys.argv.pop(1)]
    with target.check() as check:

        @hypothesis.settings(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(target.strategy)
        def one(value: object) -> None:
            check(value)

        atheris.Setup(sys.argv, one.hypothesis.fuzz_one_input)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
