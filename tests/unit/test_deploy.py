"""The container file and the manifests, without an engine: what they name exists, and what they promise holds."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock.config import load_config

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = re.sub(r"\\\n", "", (ROOT / "deploy/Containerfile").read_text())
LINES = [line for line in CONTAINER.splitlines() if line and not line.startswith("#")]
MANIFESTS = {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy/kubernetes/penstock.yaml").read_text())}


def arguments(instruction: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in LINES if line.startswith(f"{instruction} ")]


def test_the_container_copies_what_exists_and_what_a_build_needs() -> None:
    copied = {source for each in arguments("COPY") if not each[0].startswith("--") for source in each[:-1]}
    assert all((ROOT / source).exists() for source in copied)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {"pyproject.toml", "src", build["project"]["readme"], *build["project"]["license-files"]} <= copied


def test_the_container_has_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [[default]] = arguments("ARG")
    assert set(default.removeprefix("EXTRAS=").split(",")) <= set(extras)


def test_the_container_runs_without_privileges_and_checks_its_health() -> None:
    assert arguments("USER") == [["10001"]]
    assert not arguments("ADD")
    (check,) = [line for line in LINES if line.startswith("HEALTHCHECK")]
    assert "http://127.0.0.1:8321/healthz" in check
    assert arguments("STOPSIGNAL") == [["SIGTERM"]]


def test_the_manifests_fit_the_schemas_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for manifest in MANIFESTS.values():
        validator.validate(manifest, "1.29", strict=True)


def test_names_in_the_manifests_refer_to_each_other() -> None:
    """What no schema checks, and what an API server accepts, too: then no pod would start, or nobody would reach it."""
    service, stateful = MANIFESTS["Service"]["spec"], MANIFESTS["StatefulSet"]["spec"]
    pod, labels = stateful["template"]["spec"], stateful["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    assert service["selector"].items() <= labels.items()
    assert stateful["selector"]["matchLabels"].items() <= labels.items()
    assert stateful["serviceName"] == MANIFESTS["Service"]["metadata"]["name"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert {each["targetPort"] for each in service["ports"]} <= ports.keys()
    assert {
        container[f"{name}Probe"]["httpGet"]["port"] for name in ("liveness", "startup", "readiness")
    } <= ports.keys()
    assert stateful["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    assert [each["secretRef"]["name"] for each in container["envFrom"]] == [MANIFESTS["Secret"]["metadata"]["name"]]
    (config,) = [each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each]
    assert config == MANIFESTS["ConfigMap"]["metadata"]["name"]
    assert {each["metadata"]["name"] for each in stateful["volumeClaimTemplates"]} == {"data"}
    # The image looks for its config where the volume is.
    (folder,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "config"]
    assert f"PENSTOCK_CONFIG={folder}/{next(iter(MANIFESTS['ConfigMap']['data']))}" in CONTAINER


def test_the_config_of_the_manifests_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(MANIFESTS["ConfigMap"]["data"]["penstock.toml"])
    config = load_config(path, MANIFESTS["Secret"]["stringData"])
    assert config.server is not None
    (container,) = MANIFESTS["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": config.server.port}]
    assert MANIFESTS["Service"]["metadata"]["name"] in config.server.hosts
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert any(config.pipeline.spool.path.is_relative_to(mount) for mount in mounts)


def test_the_manifests_confine_the_pipeline_and_probe_paths_of_the_server() -> None:
    pod = MANIFESTS["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 10001
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert MANIFESTS["StatefulSet"]["spec"]["replicas"] == 1
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "startup", "readiness")}
    assert probes == {"liveness": "/healthz", "startup": "/healthz", "readiness": "/readyz"}
    volumes = {each["name"] for each in pod["volumes"]} | {"data"}
    assert {each["name"] for each in container["volumeMounts"]} == volumes
