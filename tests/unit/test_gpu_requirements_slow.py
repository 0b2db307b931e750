"""requirements/gpu.txt without a GPU: it resolves, and its vLLM has the names that we use."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hybridrl.rollout.vllm import compat as vllm_compat
from hybridrl.rollout.vllm import decode_graph as vllm_decode_graph
from hybridrl.rollout.vllm import experts as vllm_experts
from hybridrl.rollout.vllm import multi_step as vllm_multi_step
from hybridrl.rollout.vllm import recorded as vllm_recorded
from hybridrl.rollout.vllm import steps as vllm_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(
    line.split("==")
    for line in (ROOT / "requirements/gpu.txt").read_text().splitlines()
    if not line.startswith("#")
)
# Methods of vLLM's newer model runner, which it takes on GPUs.
NEWER_RUNNER = tuple(
    ("vllm.v1.worker.gpu.model_runner", path)
    for module, path in vllm_compat.NAMES + vllm_recorded.NAMES
    if module == "vllm.v1.worker.gpu_model_runner"
)
# Names in the pinned release, and in the oldest supported one, whose experts have other kernels.
OLDEST = vllm_compat.NAMES + vllm_steps.NAMES
VLLM_RELEASES = [
    (
        PINS["vllm"],
        OLDEST
        + vllm_decode_graph.NAMES
        + vllm_experts.NAMES
        + vllm_multi_step.NAMES
        + vllm_recorded.KEPT_NAMES
        + vllm_recorded.NAMES
        + NEWER_RUNNER,
    ),
    ("0.25.1", OLDEST),
]


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """Return the command of a pip that resolves by metadata, without downloading wheels."""
    python = tmp_path_factory.mktemp("pip") / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, "install", "--upgrade", "pip>=26"], check=True)
    return command


def test_the_set_resolves_and_pins_everything_it_needs(pip, tmp_path):
    report = tmp_path / "report.json"
    target = ["--dry-run", "--ignore-installed", "--report", str(report)]
    subprocess.run([*pip, "install", *target, "-r", ROOT / "requirements/gpu.txt"], check=True)
    found = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    assert {normalised(one["name"]): one["version"] for one in found} == PINS


@pytest.mark.parametrize(("release", "names"), VLLM_RELEASES)
def test_names_exist_in_the_wheel(pip, tmp_path, release, names):
    """Its Python modules import without a GPU, with the CPU build of torch that is installed."""
    command = [*pip, "download", "--no-deps", "--dest", tmp_path, f"vllm=={release}"]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            tmp_path, [name for name in archive.namelist() if not name.endswith(".so")]
        )
    code = (
        "from hybridrl.rollout.vllm import compat as vllm_compat\n"
        "vllm_compat.set_environment('cpu', enforce_eager=True)\n"
        "import vllm\n"
        "from tests.support.installed_names import missing\n"
        f"print(vllm.__file__, missing({names!r}))"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ran.stdout.split(maxsplit=1) == [f"{tmp_path}/vllm/__init__.py", "[]\n"], ran.stderr
