"""deploy/kubernetes: the manifest has KubeRay's fields, and its parts fit each other.

No cluster was asked: rayjob_schema.json is written from KubeRay's API reference.
"""

import copy
import json
import re
import shlex
from typing import Any

import jsonschema
import pytest
import yaml

from hybridrl.config.command.command_line import parse_argv, precompose
from hybridrl.main import conf_dir
from tests.unit.deploy_stubs import REPO

MANIFEST = yaml.safe_load((REPO / "deploy/kubernetes/rayjob.yaml").read_text())
SCHEMA = json.loads((REPO / "tests/unit/rayjob_schema.json").read_text())
CLUSTER = MANIFEST["spec"]["rayClusterSpec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
PODS = {
    "head": CLUSTER["headGroupSpec"]["template"]["spec"],
    "worker": WORKERS["template"]["spec"],
}
UNITS = {"Gi": 2**30, "Mi": 2**20, "": 1}


def overrides() -> list[str]:
    """What the entrypoint gives hybridrl.main."""
    words = shlex.split(MANIFEST["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "hybridrl.main"]
    return words[3:]


def size(quantity: str) -> int:
    """Bytes of a quantity of memory."""
    found = re.fullmatch(r"(\d+)(\w*)", quantity)
    assert found is not None
    return int(found[1]) * UNITS[found[2]]


def test_it_has_the_fields_of_kuberay():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(MANIFEST, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "entryPoint"], "python"),
        (["spec", "rayClusterSpec", "authOptions", "mode"], "tokens"),
        (["spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"], 4),
        (["spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "shmSize"], "1Gi"),
    ],
)
def test_the_schema_refuses_a_slip(path, value):
    manifest: Any = copy.deepcopy(MANIFEST)
    node = manifest
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize("name", PODS)
@pytest.mark.parametrize(
    "path",
    [
        ["securityContext"],
        ["securityContext", "fsGroup"],
        ["containers", 0, "securityContext", "runAsUser"],
    ],
    ids=lambda path: str(path[-1]),
)
def test_the_schema_misses_what_storage_and_capabilities_need(name, path):
    manifest: Any = json.loads(json.dumps(MANIFEST))  # so that the pods share nothing
    cluster = manifest["spec"]["rayClusterSpec"]
    group = {"head": cluster["headGroupSpec"], "worker": cluster["workerGroupSpecs"][0]}[name]
    node = group["template"]["spec"]
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize("name", PODS)
def test_the_claim_belongs_to_the_group_of_the_images_user(name):
    dockerfile = (REPO / "deploy/docker/Dockerfile").read_text()
    (user,) = re.findall(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    assert f"useradd --create-home --uid {user}" in dockerfile  # and a group of that number
    assert PODS[name]["securityContext"]["fsGroup"] == int(user)


def test_the_entrypoint_composes():
    assert precompose(parse_argv(overrides()), conf_dir()).problems == []


def test_the_run_is_as_large_as_the_cluster():
    sizes = dict(text.split("=") for text in overrides() if text.startswith("cluster."))
    assert int(sizes["cluster.nodes"]) == 1 + WORKERS["replicas"]
    for pod in PODS.values():
        gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert gpus == sizes["cluster.gpus_per_node"]
    assert WORKERS["replicas"] == WORKERS["minReplicas"] == WORKERS["maxReplicas"]


def test_head_and_worker_differ_in_name_and_ports_alone():
    """The image, its environment and its limits are the same, or versions and settings disagree."""
    head, worker = (dict(pod["containers"][0]) for pod in PODS.values())
    head.pop("ports")
    assert head.pop("name") != worker.pop("name")
    assert head == worker


def test_ray_is_the_pinned_one():
    pins = (REPO / "requirements/gpu.txt").read_text()
    assert f"ray=={CLUSTER['rayVersion']}\n" in pins


@pytest.mark.parametrize("name", PODS)
def test_shared_memory_is_large_and_within_the_pods_memory(name):
    (container,) = PODS[name]["containers"]
    volumes = {volume["name"]: volume for volume in PODS[name]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert 2**34 <= size(shm["sizeLimit"]) < size(container["resources"]["limits"]["memory"]) / 2
    assert set(mounts.values()) == set(volumes)


@pytest.mark.parametrize("name", PODS)
def test_runs_and_the_hub_cache_lie_on_the_claim_and_memory_may_be_locked(name):
    (container,) = PODS[name]["containers"]
    (claim,) = (
        volume["name"]
        for volume in PODS[name]["volumes"]
        if len(volume) == 2 and "persistentVolumeClaim" in volume
    )
    (path,) = (mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == claim)
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert path == f"{container['workingDir']}/outputs"
    assert environment["HF_HOME"].startswith(f"{path}/")
    assert container["securityContext"] == {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK"]}}


def test_the_token_comes_from_kuberay_and_stands_nowhere():
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert "RAY_AUTH_TOKEN" not in {
        e["name"] for p in PODS.values() for e in p["containers"][0]["env"]
    }


def test_the_head_tells_its_ports():
    (container,) = PODS["head"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
