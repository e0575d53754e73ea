"""The files in `envoy/` are what the builder builds, and its fragments fit into another Envoy."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.envoy import OLDER_VERSIONS, older_envoy, require_envoy

FOLDER = Path(__file__).parents[2] / "envoy"


def load_generator():
    spec = importlib.util.spec_from_file_location("envoy_samples", FOLDER / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()
SAMPLES = generate.samples()


def validate(path, binary=None):
    command = [binary or require_envoy(), "--mode", "validate", "-c", path, "--disable-hot-restart"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_samples_are_in_step_with_the_builder(capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_the_check_names_what_is_out_of_date(tmp_path, monkeypatch, capsys):
    (tmp_path / "fragments").mkdir()
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    (tmp_path / "standalone.yaml").write_text("admin: {}\n")
    (tmp_path / "workers.yaml").unlink()
    assert generate.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert "envoy/standalone.yaml" in told
    assert "envoy/workers.yaml" in told
    assert "fragments" not in told


def test_every_sample_is_in_the_readme():
    readme = (FOLDER / "README.md").read_text()
    assert [name for name in SAMPLES if f"`{name}`" not in readme] == []


def test_the_folder_is_no_package():
    # A package called `envoy` would hide the module of Envoy's own wheel.
    assert not (FOLDER / "__init__.py").exists()


STANDALONE = [name for name in SAMPLES if name.startswith("standalone")]


@pytest.mark.envoy
@pytest.mark.parametrize("name", STANDALONE)
def test_envoy_accepts_the_sample(name, tmp_path):
    accept(name, tmp_path)


@pytest.mark.envoy
@pytest.mark.parametrize("version", OLDER_VERSIONS)
def test_older_envoys_accept_the_samples_for_them(version, tmp_path):
    binary = older_envoy(version)
    fit = STANDALONE if version >= "1.38" else [f"standalone-{version}.yaml"]
    assert set(fit) <= set(STANDALONE)
    for name in fit:
        accept(name, tmp_path, binary)


def accept(name, tmp_path, binary=None):
    text = SAMPLES[name]
    if name == "standalone-eds.yaml":
        (tmp_path / "workers.yaml").write_text(SAMPLES["workers.yaml"])
        text = text.replace("/etc/envoy/workers.yaml", str(tmp_path / "workers.yaml"))
    (tmp_path / "envoy.yaml").write_text(text)
    validate(tmp_path / "envoy.yaml", binary)


@pytest.mark.envoy
def test_the_fragments_fit_into_another_envoy(tmp_path):
    part = {
        name.removeprefix("fragments/").removesuffix(".yaml"): yaml.safe_load(text)
        for name, text in SAMPLES.items()
        if name.startswith("fragments/")
    }
    host = {"name": "theirs", "domains": ["theirs.example"], "routes": []}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "theirs",
        **part["access_log"],
        **part["early_header_mutation"],
        "tracing": part["tracing"]["tracing"],
        "route_config": {"virtual_hosts": [host, *part["virtual_host"]["virtual_hosts"]]},
        "http_filters": [
            *part["http_filters"]["http_filters"],
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            },
        ],
    }
    listener = {
        "name": "theirs",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    theirs = {
        "static_resources": {
            "listeners": [listener],
            "clusters": [*part["clusters"]["clusters"], *part["tracing"]["clusters"]],
        }
    }
    (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(theirs))
    validate(tmp_path / "envoy.yaml")
