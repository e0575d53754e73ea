"""The locks of the image: exact versions, with hashes, of what is installed into it and of what builds it.

python .ci/lock.py write    # anew, with `uv` (pip install uv): the newest versions that pyproject.toml allows
python .ci/lock.py check    # that they pin what pyproject.toml asks for; needs no network
python .ci/lock.py audit    # known vulnerabilities (pip install pip-audit); says so where it cannot ask
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXTRAS = ("envoy", "fast", "kubernetes")
LOCK, BUILD_LOCK = ROOT / "deploy" / "requirements.lock", ROOT / "deploy" / "build.lock"
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
_UNREACHABLE = (
    "ConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
    "SSLError",
    "Name or service",
)


def wanted() -> tuple[list[Requirement], list[Requirement]]:
    """What pyproject.toml asks for: to run, and to build."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    project = settings["project"]
    extras = [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    run = map(Requirement, [*project["dependencies"], *extras])
    return list(run), list(map(Requirement, settings["build-system"]["requires"]))


def pins(lock: Path) -> dict[str, str]:
    """Versions by name.

    Raises:
        ValueError: an entry has no hash, or is none of a package index.
    """
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").strip()):
        match = _PIN.match(entry)
        if match is None or "://" in entry:
            raise ValueError(f"{lock.name}: not an exact version: {entry.splitlines()[0]}")
        if not _HASH.search(entry):
            raise ValueError(f"{lock.name}: {match[1]} has no hash")
        found[canonicalize_name(match[1])] = match[2]
    return found


def problems() -> list[str]:
    """Where the locks do not do what pyproject.toml asks for."""
    out = []
    for lock, requirements in zip((LOCK, BUILD_LOCK), wanted(), strict=True):
        try:
            pinned = pins(lock)
        except (OSError, ValueError) as error:
            out.append(str(error))
            continue
        for requirement in requirements:
            version = pinned.get(canonicalize_name(requirement.name))
            if version is None:
                out.append(f"{lock.name}: {requirement.name} is missing")
            elif not requirement.specifier.contains(version, prereleases=True):
                out.append(f"{lock.name}: {requirement.name} {version} is not {requirement.specifier}")
    return out


def write() -> None:
    """Resolve anew, for every platform and Python that is supported."""
    common = [
        *("uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"),
        *("--no-header", "--no-annotate", "--no-emit-index-url", "--no-cache"),
    ]
    extras = [part for extra in EXTRAS for part in ("--extra", extra)]
    subprocess.run([*common, *extras, "pyproject.toml", "-o", str(LOCK)], cwd=ROOT, check=True)  # noqa: S603
    build = "\n".join(map(str, wanted()[1]))
    resolve = [*common, "-", "-o", str(BUILD_LOCK)]
    subprocess.run(resolve, cwd=ROOT, check=True, input=build, text=True)  # noqa: S603


def audit() -> int:
    """0: nothing known, or nobody could be asked; 1: something is known."""
    status = 0
    for lock in (LOCK, BUILD_LOCK):
        command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "-r", str(lock)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own words
        said = done.stdout + done.stderr
        if "could not be audited" in said or (done.returncode and any(word in said for word in _UNREACHABLE)):
            print(f"SKIPPED: the advisory service cannot be asked from here: {lock.name} was not audited")
        else:
            print(f"{lock.name}: {said.strip()}")
            status |= bool(done.returncode)
    return status


def main() -> int:
    """See the module."""
    match sys.argv[1:]:
        case ["write"]:
            write()
        case ["audit"]:
            return audit()
        case ["check"]:
            pass
        case _:
            print(__doc__)
            return 2
    found = problems()
    print("\n".join(found) or "the locks pin what pyproject.toml asks for")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
