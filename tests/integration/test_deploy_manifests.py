"""The manifests in deploy/: valid, and in agreement with each other and with what Warmroute does."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import yaml

from extproc import config as configuration
from extproc.cli.envoy_config import envoy_settings
from tests.support.envoy import require_envoy
from tests.support.manifests import build, check

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml"))


def load_generator():
    spec = importlib.util.spec_from_file_location("deploy_generate", DEPLOY / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


def test_generated_files_are_in_step_with_the_builder(tmp_path, monkeypatch, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err
    for name in ("compose", "kubernetes/istio"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "compose" / "warmroute.yaml").write_text((DEPLOY / "compose" / "warmroute.yaml").read_text())
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    assert generate.main(["--check"]) == 1
    assert "kubernetes/istio/envoyfilter.yaml is out of date" in capsys.readouterr().err
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_manifest_is_valid(name):
    documents = build(KUBERNETES / name)
    assert documents
    for document in documents:
        check(document)


def test_a_mistake_in_a_manifest_is_found():
    (pool,) = (d for d in build(KUBERNETES / "inference-extension") if d["kind"] == "InferencePool")
    pool["spec"]["endpointPickerRef"]["failureMode"] = "FailSoft"
    with pytest.raises(AssertionError, match=r"endpointPickerRef\.failureMode: 'FailSoft'"):
        check(pool)
    deployment = next(d for d in build(KUBERNETES / "service") if d["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(AssertionError, match="livenesProbe"):
        check(deployment)


def pods(documents):
    """(name, labels, pod spec, containers) of every Deployment."""
    for document in documents:
        if document["kind"] == "Deployment":
            template = document["spec"]["template"]
            spec = template["spec"]
            containers = [*spec.get("initContainers", ()), *spec["containers"]]
            yield document["metadata"]["name"], template["metadata"]["labels"], spec, containers


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_have_what_their_containers_and_services_ask_for(name):
    documents = build(KUBERNETES / name)
    config_maps = {d["metadata"]["name"] for d in documents if d["kind"] == "ConfigMap"}
    services = [d for d in documents if d["kind"] == "Service"]
    accounts = {d["metadata"]["name"] for d in documents if d["kind"] == "ServiceAccount"} | {"default"}
    all_labels = []
    for _, labels, spec, containers in pods(documents):
        all_labels.append(labels)
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        assert spec.get("serviceAccountName", "default") in accounts
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name") in {*config_maps, None}
        for container in containers:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= set(volumes)
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container.get(probe, {}).get("httpGet", {}).get("port")
                assert asked is None or asked in ports, f"{container['name']} {probe}"
            if container["image"].startswith(("warmroute", "envoyproxy")):
                security = container["securityContext"]
                assert security["readOnlyRootFilesystem"]
                assert not security["allowPrivilegeEscalation"]
                assert spec["securityContext"]["runAsNonRoot"]
    for service in services:
        selector = service["spec"]["selector"]
        fit = [labels for labels in all_labels if selector.items() <= labels.items()]
        assert fit, f"Service {service['metadata']['name']} selects no pod"


def configurations():
    yield from KUBERNETES.glob("*/warmroute.yaml")
    yield from (DEPLOY / "compose").glob("warmroute*.yaml")


@pytest.mark.parametrize("path", [*configurations()], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_configuration_is_one(path):
    envoy_settings(configuration.load(path))


@pytest.mark.parametrize("name", ["service", "sidecar"])
def test_roles_and_network_policies_admit_what_discovery_and_events_need_and_no_more(name):
    documents = build(KUBERNETES / name)
    (role,) = (d for d in documents if d["kind"] == "Role")
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (policy,) = (d for d in documents if d["kind"] == "NetworkPolicy")
    config = configuration.load(KUBERNETES / name / "warmroute.yaml")
    events = config.pools[0].kv_events
    to_engines = policy["spec"]["egress"][0]["ports"]

    def admits(port):
        return any(one["port"] <= port <= one.get("endPort", one["port"]) for one in to_engines)

    for address in (events.endpoint, events.replay):
        assert admits(int(address.rpartition(":")[2]))
    assert admits(8000)


def test_replicas_of_the_service_find_and_reach_each_other():
    documents = build(KUBERNETES / "service")
    peers = configuration.load(KUBERNETES / "service" / "warmroute.yaml").peers
    (headless,) = (d for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == peers.dns.name)
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"]
    assert headless["spec"]["ports"][0]["port"] == peers.dns.port == int(peers.listen.rpartition(":")[2])
    (policy,) = (d for d in documents if d["kind"] == "NetworkPolicy")
    for direction in ("ingress", "egress"):
        assert any({"port": peers.dns.port} in rule["ports"] for rule in policy["spec"][direction])


def test_probes_ask_what_the_health_service_knows():
    for name in ("service", "sidecar"):
        for _, _, _, containers in pods(build(KUBERNETES / name)):
            for container in containers:
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    asked = container.get(probe, {}).get("grpc")
                    assert asked is None or asked in (
                        {"port": 50051, "service": "liveness"},
                        {"port": 50051, "service": "readiness"},
                    )


def test_the_names_in_the_envoy_filter_are_those_of_the_services():
    documents = build(KUBERNETES / "istio")
    found = {(d["kind"], d["metadata"]["name"]): d for d in documents}
    (rule,) = (d for d in documents if d["kind"] == "DestinationRule")
    (virtual,) = (d for d in documents if d["kind"] == "VirtualService")
    (route,) = virtual["spec"]["http"]
    assert rule["spec"]["host"] == generate.ENGINES == route["route"][0]["destination"]["host"]
    assert route["name"] == generate.ROUTE
    service = found["Service", "warmroute"]
    host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc.cluster.local"
    port = service["spec"]["ports"][0]["port"]
    assert f"outbound|{port}||{host}" == generate.ROUTER_CLUSTER


@pytest.mark.envoy
def test_envoy_accepts_the_demos_configuration():
    command = [require_envoy(), "--mode", "validate", "-c", DEPLOY / "compose" / "envoy.yaml"]
    done = subprocess.run([*command, "--disable-hot-restart"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_demo_mounts_files_that_exist_and_names_services_that_do():
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    settings = dict(
        line.split("=", 1)
        for line in (DEPLOY / "compose" / ".env").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    services = compose["services"]
    for name, service in services.items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            for key, value in settings.items():
                source = source.replace(f"${{{key}}}", value)
            # Dashboards and rules are folders of their own.
            assert (DEPLOY / "compose" / source).exists(), f"{name}: {source}"
        for variable in [part[2:-1] for part in str(service).split() if part.startswith("${")]:
            assert variable in settings, f"{name}: {variable}"
        assert set(service.get("depends_on", ())) <= set(services)
    config = configuration.load(DEPLOY / "compose" / "warmroute.yaml")
    assert {router.partition(":")[0] for router in config.envoy.router} <= set(services)
