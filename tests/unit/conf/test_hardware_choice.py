"""Which hardware a run takes that names none: by nvidia-smi, here a script that answers alike."""

import os
import subprocess
import sys

import pytest

from hybridrl.app.before_start import compose_line, examine
from hybridrl.app.compose import hardware_overrides
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner import nvidia_smi
from hybridrl.config.planner.machine import GIB, GPU, Machine, Node, local_machine
from tests.support.composing import problems

MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
H200 = GPU("NVIDIA H200", 143771 * 2**20)
# Folders and files close themselves to everybody but root.
ASK_AS_USER = """
import os
from hybridrl.config.planner import nvidia_smi
if os.getuid() == 0:
    os.setuid(65534)
print(nvidia_smi.ask("uuid"))
"""


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Have nvidia-smi be a shell script of these lines."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def put(lines):
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (f"echo '{MISMATCH}'; echo 'NVML library version: 535.161'; exit 18", f"{MISMATCH} NVML"),
        ("echo 'no driver' >&2; exit 9", "no driver"),
        ("exit 9", "exit code 9"),
        ("exec sleep 20", "no answer within 0.5 s"),
        ("echo 'GPU-1, NVIDIA GB10, [N/A]'", "output 'GPU-1, NVIDIA GB10, [N/A]', expected"),
    ],
    ids=["mismatch", "stderr", "silent", "hanging", "no memory"],
)
def test_a_failing_nvidia_smi_is_not_taken_for_no_gpu(answers, monkeypatch, lines, told):
    monkeypatch.setattr(nvidia_smi, "QUERY_S", 0.5)
    answers(lines)
    machine = local_machine()
    assert machine.gpus == ()
    with pytest.raises(ConfigError) as raised:
        hardware_overrides(machine)
    (problem,) = raised.value.problems
    assert problem.id == "hardware" and f"nvidia-smi failed: {told}" in problem.why
    assert machine.nodes[0].name in problem.why
    assert "Repair this, or set hardware=cpu" in problem.remedy


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("echo 'GPU-1, NVIDIA H200, 143771'", "gpu"),
        ("echo 'No devices were found'; exit 6", "cpu"),
        ("true", "cpu"),
    ],
)
def test_a_working_nvidia_smi_decides(answers, lines, name):
    answers(lines)
    machine = local_machine()
    assert machine.gpus == ((H200,) if name == "gpu" else ())
    assert hardware_overrides(machine)[0] == f"hardware={name}"


def test_a_run_asks_once_for_the_machine(answers, tmp_path):
    """Where no daemon keeps the driver loaded, each answer takes more than a second."""
    log = tmp_path / "asked"
    answers(f"echo >> {log}; echo 'GPU-1, NVIDIA H200, 143771'")
    checked = examine(compose_line(parse_argv(["+recipe=gsm8k_grpo"]), guards_output=False))
    assert checked.machine.gpus == (H200,)
    assert checked.result.config.hardware.accelerator == "gpu"
    assert log.read_text().count("\n") == 1


def test_a_machine_without_nvidia_smi_has_no_gpu(answers, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware_overrides(local_machine())[0] == "hardware=cpu"


def test_a_folder_on_the_path_that_may_not_be_entered_is_no_failing_nvidia_smi(tmp_path):
    """As in a container with /root/.local/bin on PATH that runs as another user."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    done = subprocess.run(
        [sys.executable, "-c", ASK_AS_USER],
        env=os.environ | {"PATH": f"{closed}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.stdout == f"{('', nvidia_smi.NOT_THERE)}\n", done.stderr


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_nvidia_smi_is_not_asked_for_gpus_that_are_hidden(answers, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    answers("exit 9")
    assert hardware_overrides(local_machine())[0] == "hardware=cpu"


@pytest.mark.parametrize("visible", ["MIG-5c0e", "all", "7"])
def test_a_variable_that_names_no_gpu_is_no_machine_without_gpus(answers, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    answers("echo 'GPU-1, NVIDIA H200, 143771'")
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={visible} names none of the 1 "):
        hardware_overrides(local_machine())


def test_a_cluster_with_gpus_needs_no_answer_of_all_nodes():
    failed = Node("a", 8, 64 * GIB, gpu_error=nvidia_smi.failed(MISMATCH))
    machine = Machine((failed, Node("b", 8, 64 * GIB, (H200,))))
    assert hardware_overrides(machine)[0] == "hardware=gpu"


def test_given_hardware_is_checked_against_the_failure():
    machine = Machine((Node("a", 8, 64 * GIB, gpu_error=nvidia_smi.failed(MISMATCH)),))
    assert problems("hardware=cpu", machine=machine) == []
    found = problems("hardware=gpu", "cluster.gpus_per_node=1", machine=machine)
    assert any(f"nvidia-smi failed: {MISMATCH} (on a)" in problem for problem in found), found
