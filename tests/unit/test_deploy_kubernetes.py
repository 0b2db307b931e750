"""deploy/kubernetes: the manifest has KubeRay's fields, and its parts fit each other.

No cluster was asked: rayjob_schema.json is written from KubeRay's API reference.
"""

import json
import re
import shlex

import jsonschema
import pytest
import yaml

from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.overrides import precompose
from hybridrl.main import conf_dir
from tests.support.deploy_stubs import REPO

pytestmark = pytest.mark.full

MANIFEST = yaml.safe_load((REPO / "deploy/kubernetes/rayjob.yaml").read_text())
SCHEMA = json.loads((REPO / "tests/support/rayjob_schema.json").read_text())
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
