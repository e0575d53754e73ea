"""Tests mirror the packages: a module without a test file of its own is a defect."""

from pathlib import Path

ROOT = Path(__file__).parent.parent

# Modules whose behaviour is another module's test's subject, each with the reason.
COVERED_ELSEWHERE = {
    "extproc/__main__.py": "two lines; every command test goes through it",
    "extproc/core/types.py": "plain values",
    "extproc/core/errors.py": "plain values",
    "extproc/core/policies/base.py": "an interface; reasons are tested with token_load",
    "extproc/core/kv_residence.py": "the inside of the index, tested as a whole against a plain model",
    "extproc/core/kv_states.py": "the inside of the index, as above",
    "extproc/protocol/ext_proc_messages.py": "plain values",
    "extproc/protocol/kv_sequence_types.py": "plain values",
    "extproc/adapters/doctor_findings.py": "plain values",
    "extproc/adapters/doctor_probe.py": "the inside of the doctor",
    "extproc/adapters/holding.py": "plain values",
    "extproc/adapters/peer_status.py": "plain values",
    "extproc/adapters/prompt_messages.py": "plain values",
    "extproc/adapters/prompt_process.py": "the inside of prompt_processes, tested with real children",
    "extproc/adapters/routing.py": "an interface; implemented and tested in routing_service",
    "extproc/adapters/envoy_messages.py": "the inside of envoy_bootstrap",
    "extproc/adapters/envoy_clusters.py": "the inside of envoy_bootstrap",
    "extproc/config/base.py": "plain values",
    "extproc/config/cost.py": "fields; read as users write them in test_loading",
    "extproc/config/pools.py": "fields; read as users write them in test_loading",
    "extproc/config/root.py": "fields; read as users write them in test_loading",
    "extproc/config/rollout.py": "fields; read as users write them in test_references",
    "extproc/config/service.py": "fields; read as users write them in test_loading",
}


def test_every_module_has_its_own_test_file():
    missing = []
    for module in sorted((ROOT / "extproc").rglob("*.py")):
        path = module.relative_to(ROOT)
        if path.name == "__init__.py" or path.parts[1] in ("pb", "data") or str(path) in COVERED_ELSEWHERE:
            continue
        expected = ROOT / "tests" / Path(*path.parts[1:-1]) / f"test_{path.name}"
        if not expected.exists():
            missing.append(f"{path} -> {expected.relative_to(ROOT)}")
    assert not missing, "\n".join(missing)


def test_exceptions_name_modules_that_exist():
    assert [path for path in COVERED_ELSEWHERE if not (ROOT / path).exists()] == []


def test_nothing_hides_the_envoy_binary_package():
    assert not (ROOT / "envoy" / "__init__.py").exists()
