"""deploy/ray: the Serve files, the KubeRay manifest and the image belong together. Nothing is started."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from hisparse.actors.memory_plan import MemoryPlan
from hisparse.actors.placement import bundles
from hisparse.config import HiSparseConfig, load_config
from hisparse.serve.app import build_app
from hisparse.serve.ending import ENDING_S
from hisparse.serve.keys import KeyRing

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy" / "ray"
GIB = 1 << 30
UNITS = {"Gi": GIB, "Mi": 1 << 20}
OBJECT_STORE = 8 * GIB

ANY = object()
POD = {"metadata": {"labels": {"*": str}, "annotations": {"*": str}}, "spec!": {
    "terminationGracePeriodSeconds": int, "nodeSelector": {"*": str}, "tolerations": list, "affinity": dict,
    "serviceAccountName": str, "priorityClassName": str, "initContainers": list,
    "volumes": [{"name!": str, "secret": {"secretName": str}, "emptyDir": {"medium": str, "sizeLimit": str},
                 "persistentVolumeClaim": {"claimName!": str, "readOnly": bool}, "hostPath": {"path!": str, "type": str}}],
    "containers!": [{
        "name!": str, "image": str, "imagePullPolicy": str, "command": [str], "args": [str],
        "ports": [{"name": str, "containerPort!": int, "protocol": str}],
        "env": [{"name!": str, "value": str, "valueFrom": dict}],
        "resources": {"requests": {"*": ANY}, "limits": {"*": ANY}},
        "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool, "subPath": str}],
        "securityContext": {"capabilities": {"add": [str], "drop": [str]}, "privileged": bool, "runAsUser": int},
        "lifecycle": dict, "livenessProbe": dict, "readinessProbe": dict,
    }],
}}
GROUP = {"rayStartParams!": {"*": str}, "template!": POD}
RAY_SERVICE: dict[str, Any] = {
    "apiVersion!": str, "kind!": str, "metadata!": {"name!": str, "namespace": str, "labels": {"*": str}},
    "spec!": {
        "serveConfigV2": str, "serveService": dict, "serviceUnhealthySecondThreshold": int,
        "deploymentUnhealthySecondThreshold": int, "rayClusterConfig": {
            "rayVersion": str, "enableInTreeAutoscaling": bool, "autoscalerOptions": dict,
            "headServiceAnnotations": {"*": str}, "suspend": bool,
            "headGroupSpec!": {"serviceType": str, "headService": dict, "enableIngress": bool, **GROUP},
            "workerGroupSpecs": [{"groupName!": str, "replicas": int, "minReplicas!": int, "maxReplicas!": int,
                                  "numOfHosts": int, "scaleStrategy": dict, **GROUP}],
        },
    },
}
"""Fields of ray.io/v1 RayService as KubeRay's Go types declare them (rayservice_types.go, raycluster_types.go), and of a pod
those that one may want; `!` = required. An API server refuses a field of another type, and drops one that it does not know."""


def check_shape(value: Any, shape: Any, path: str = "") -> None:
    if shape is ANY:
        assert isinstance(value, (str, int)), path
    elif isinstance(shape, type):
        assert type(value) is shape, f"{path}: {value!r} is not a {shape.__name__}"
    elif isinstance(shape, list):
        assert isinstance(value, list) and value, path
        for i, item in enumerate(value):
            check_shape(item, shape[0], f"{path}[{i}]")
    else:
        assert isinstance(value, dict), path
        fields = {key.removesuffix("!"): inner for key, inner in shape.items()}
        missing = {key.removesuffix("!") for key in shape if key.endswith("!")} - set(value)
        assert not missing, f"{path} lacks {sorted(missing)}"
        for key, item in value.items():
            assert key in fields or "*" in fields, f"{path}.{key} is not a field"
            check_shape(item, fields.get(key, fields.get("*")), f"{path}.{key}")


def manifest() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "kuberay" / "rayservice.yaml").read_text()))


def serve_file(document: dict[str, Any]) -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(yaml.safe_load(document["spec"]["serveConfigV2"]))


def config_of(schema: ServeDeploySchema) -> HiSparseConfig:
    (application,) = schema.applications
    assert application.import_path == "hisparse.serve:build_app"
    return load_config(dict(application.args), environ={})


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(Gi|Mi)", text)
    assert match is not None, f"{text} is not a size"
    return int(match[1]) * UNITS[match[2]]


@pytest.fixture
def worker() -> dict[str, Any]:
    (group,) = manifest()["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return dict(group)


def test_the_manifest_has_the_shape_of_a_ray_service() -> None:
    document = manifest()
    check_shape(document, RAY_SERVICE)
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayService")
    broken = manifest()
    broken["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    with pytest.raises(AssertionError, match=r"rayClusterConfig.workerGroupSpec is not a field"):
        check_shape(broken, RAY_SERVICE)
    broken = manifest()
    del broken["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplicas"]
    with pytest.raises(AssertionError, match=r"workerGroupSpecs\[0\] lacks \['minReplicas'\]"):
        check_shape(broken, RAY_SERVICE)
    with pytest.raises(AssertionError, match=r"num-cpus: 0 is not a str"):
        check_shape({"num-cpus": 0}, {"*": str})


def test_its_serve_file_fits_rays_schema_and_our_models() -> None:
    schema = serve_file(manifest())
    config = config_of(schema)
    assert schema.http_options.host == config.serve.host == "0.0.0.0", "so that our check of keys is in force"
    assert config.serve.api_keys_file and not config.serve.api_keys
    build_app(dict(schema.applications[0].args))
    for role in ("prefill", "decode"):
        assert MemoryPlan.of(config.for_role(role)).seats > 0  # type: ignore[arg-type]


def test_pods_are_large_enough(worker: dict[str, Any]) -> None:
    config = config_of(serve_file(manifest()))
    engines = [config.for_role("prefill")] * config.serve.prefill_replicas + \
        [config.for_role("decode")] * config.serve.decode_replicas
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert limits == requests, "whole CPUs on one socket need the Guaranteed class"
    wanted = [bundle for engine in engines for bundle in bundles(engine)]
    assert limits["nvidia.com/gpu"] == sum(bundle.get("GPU", 0) for bundle in wanted)
    assert int(limits["cpu"]) >= sum(bundle["CPU"] for bundle in wanted)
    pools = sum(engine.cache.host_pool_gib for engine in engines) * GIB
    (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
    assert shm["medium"] == "Memory" and size(shm["sizeLimit"]) >= pools + OBJECT_STORE
    assert int(worker["rayStartParams"]["object-store-memory"]) == OBJECT_STORE
    assert size(limits["memory"]) >= size(shm["sizeLimit"]) + len(engines) * 4 * GIB
    stop_s = max(MemoryPlan.of(engine).stop_s for engine in engines)  # they stop side by side
    assert pod["terminationGracePeriodSeconds"] >= stop_s + ENDING_S
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]


def test_every_pod_has_the_keys_and_the_ports(worker: dict[str, Any]) -> None:
    document = manifest()
    schema = serve_file(document)
    keys = Path(config_of(schema).serve.api_keys_file or "")
    groups = [document["spec"]["rayClusterConfig"]["headGroupSpec"], worker]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {Path(mount["mountPath"]): mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts.values()) == set(volumes)
        assert "secret" in volumes[mounts[keys.parent]] and keys.name == "api-keys"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == schema.http_options.port
        assert str(ports["metrics"]) == group["rayStartParams"]["metrics-export-port"]
    monitor = yaml.safe_load((DEPLOY / "kuberay" / "podmonitor.yaml").read_text())
    assert [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    assert monitor["spec"]["selector"]["matchLabels"] == {"ray.io/is-ray-node": "yes"}, "heads and workers"


def test_the_keys_file_of_the_instructions_works(tmp_path: Path) -> None:
    assert "'TENANT KEY' a line" in (DEPLOY / "kuberay" / "rayservice.yaml").read_text()
    keys = tmp_path / "api-keys"
    keys.write_text("team-a 3f9c\n")
    config = load_config({"model": {"path": "recall"}, "serve": {"api_keys_file": str(keys)}}, environ={})
    assert KeyRing(config.serve).tenant("3f9c") == "team-a"


KINDS: dict[str, Any] = {
    "kuberay/rayservice.yaml": RAY_SERVICE,
    "kuberay/podmonitor.yaml": {
        "apiVersion!": str, "kind!": str, "metadata!": {"name!": str, "labels": {"*": str}}, "spec!": {
            "selector!": {"matchLabels!": {"*": str}}, "namespaceSelector": dict,
            "podMetricsEndpoints!": [{"port!": str, "interval": str, "path": str, "relabelings": list}]}},
    "prometheus/scrape.yaml": {
        "global": {"scrape_interval": str}, "rule_files": [str], "scrape_configs!": [{
            "job_name!": str, "scrape_interval": str, "metrics_path": str, "static_configs": [{"targets!": [str]}],
            "file_sd_configs": [{"files!": [str], "refresh_interval": str}]}]},
    "prometheus/rules.yaml": {"groups!": [{"name!": str, "rules!": [{
        "alert!": str, "expr!": str, "for": str, "labels!": {"severity!": str},
        "annotations!": {"summary!": str, "runbook!": str}}]}]},
    "prometheus/rules_test.yaml": {"rule_files!": [str], "evaluation_interval!": str, "tests!": [{
        "name": str, "interval!": str, "input_series!": [{"series!": str, "values!": str}],
        "alert_rule_test": [{"eval_time!": str, "alertname!": str, "exp_alerts": list}],
        "promql_expr_test": [{"expr!": str, "eval_time!": str, "exp_samples": list}]}]},
}


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_yaml_is_of_a_kind_that_is_checked(path: Path) -> None:
    """Serve files by Ray's own schema and our models; everything else by the fields of its kind. A new file needs an entry."""
    name, document = str(path.relative_to(DEPLOY)), yaml.safe_load(path.read_text())
    if "applications" in document:
        config = config_of(ServeDeploySchema.model_validate(document))
        for role in ("prefill", "decode"):
            assert MemoryPlan.of(config.for_role(role)).stop_s > 0  # type: ignore[arg-type]
        return
    assert name in KINDS, f"{name} is not checked by anything"
    check_shape(document, KINDS[name])


def test_the_image_is_built_from_what_is_here() -> None:
    """The steps of the Dockerfile fit together and the repository: paths, extras, versions, the user, the PATH."""
    docker = (DEPLOY / "Dockerfile").read_text()
    bootstrap, project = ((ROOT / name).read_text() for name in ("scripts/bootstrap.sh", "pyproject.toml"))
    extras = tomllib.loads(project)["project"]["optional-dependencies"]
    (wanted,) = re.findall(r'"\.\[([\w,]+)\]"', docker)
    assert set(wanted.split(",")) <= set(extras) and {"cuda", "otel"} <= set(wanted.split(","))
    for name in ("nixl", r"ray\[[\w,]+\]"):
        (here,), (there,) = (re.findall(rf"{name}==([\d.]+)", text) for text in (docker, bootstrap))
        assert here == there, name
    (python,) = re.findall(r"python3 -m venv (\S+)", docker)
    pips = [line.strip().removeprefix("&& ") for line in docker.splitlines() if "pip install" in line]
    assert f"ENV PATH={python}/bin:$PATH" in docker and all(pip.startswith(f"{python}/bin/pip") for pip in pips)
    (created,) = re.findall(r"useradd .*?(\w+)$", docker, re.M)
    assert re.findall(r"^USER (\w+)$", docker, re.M) == [created] and f"WORKDIR /home/{created}" in docker
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", docker, re.M) for name in line.split()}
    packaged = tomllib.loads(project)
    assert {"pyproject.toml", packaged["project"]["readme"], "LICENSE", "hisparse", "kernels"} <= copied, "what a build reads"
    (cuda,) = re.findall(r"nvidia/cuda:(\d+)\.", docker)
    assert f"cu{cuda}0" in docker and any(item.startswith(f"cupy-cuda{cuda}x") for item in extras["cuda"])


def test_image_and_manifest_have_the_ray_version_that_is_tested() -> None:
    (tested,) = re.findall(r"ray\[serve\]==([\d.]+)", (ROOT / "scripts" / "bootstrap.sh").read_text())
    docker = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"ray\[default,serve\]==([\d.]+)", docker) == [tested]
    cluster = manifest()["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == tested
    images = {container["image"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
              for container in group["template"]["spec"]["containers"]}
    (image,) = images
    assert f"-t {image} ." in docker and image.startswith("registry.example.com/"), "an image that somebody has to build"
    for copied in re.findall(r"^COPY (.+) \S+$", docker, re.M):
        assert all((ROOT / name).exists() for name in copied.split())
    (torch,) = re.findall(r"torch==([\d.]+)", docker)
    assert tuple(map(int, torch.split(".")[:2])) >= (2, 6), "pyproject.toml asks for torch>=2.6"


def test_every_file_is_in_the_readme() -> None:
    readme = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.name != "README.md":
            assert f"`{path.relative_to(DEPLOY)}`" in readme, f"{path.name} is not in deploy/ray/README.md"
