"""Command lines of the routers we are compared with. Pure.

They come from PyPI as wheels with a Rust binary inside; versions and defaults are those named here. Only
addresses are set, and what would leave files behind or take fixed ports.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = ("vllm-router==0.1.17", "sglang-router==0.3.2", "smg==1.13.0")
INSTALL = "python3 -m venv DIR && DIR/bin/pip install " + " ".join(REQUIREMENTS)
SETTING = "WARMROUTE_PEERS_VENV"


@dataclass(frozen=True, slots=True)
class RustRouter:
    """One of them: its name here, the program, and the words before its options."""

    name: str
    program: str
    subcommand: tuple[str, ...] = ()

    def command(
        self, binary: Path, port: int, metrics_port: int, workers: Sequence[str], policy: str
    ) -> list[str]:
        """How it is started on loopback, in front of `workers` (`ip:port`)."""
        return [
            *(str(binary), *self.subcommand),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *(f"http://{worker}" for worker in workers)),
            *("--policy", policy),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        ]


RUST_ROUTERS = (
    RustRouter("vllm-router", "vllm-router"),
    RustRouter("sglang-router", "sglang-router", ("launch",)),
    RustRouter("smg", "smg", ("launch",)),
)


def setting(name: str) -> str | None:
    """A setting from the environment; an empty one is none."""
    return os.environ.get(name) or None


def find(router: RustRouter, venv: str | None) -> Path | None:
    """Its program in `venv` (a virtual environment's folder); None if it is not there."""
    if not venv:
        return None
    path = Path(venv) / "bin" / router.program
    return path if os.access(path, os.X_OK) else None


def why_absent(router: RustRouter, venv: str | None) -> str:
    """What to do about a router that was not found."""
    where = f"not in {venv}" if venv else f"{SETTING} (or --peers-venv) is not set"
    return f"{router.name}: {where}; install with: {INSTALL}"
