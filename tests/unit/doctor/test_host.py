"""The first stage: variables of this process, invented nodes against each other, GPUs as told."""

import os
import time
from pathlib import Path

import pytest

import hybridrl
from hybridrl.config.choices import Accelerator, SleepMode
from hybridrl.controller.ray.node_probes import ProbeResult
from hybridrl.doctor.findings import CHECKS, Verdict
from hybridrl.doctor.host import stage as host
from hybridrl.doctor.host.facts import Ulimits, cgroup_facts, versions
from hybridrl.doctor.host.gpus import GPUFacts, Smi, judge_gpus, parse
from hybridrl.doctor.host.limits import judge_ulimits
from hybridrl.doctor.host.stage import (
    clock_skews,
    judge_clocks,
    judge_communication,
    judge_versions,
)
from hybridrl.doctor.host.variables import (
    judge_allocator,
    judge_variables,
    judge_visible,
)
from tests.support.host_cases import assert_finds, case, facts, the
from tests.support.run_configs import run_config

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def cpu():
    return run_config()


@pytest.fixture(scope="module")
def gpu():
    """The same, as if it were for GPUs."""
    config = run_config()
    config.hardware.accelerator = Accelerator.gpu
    config.rollout.sleep = SleepMode.all
    return config


def test_this_machine_passes_whole(cpu):
    findings = host.check(case(config=cpu))
    ids = {check for check in CHECKS if check.startswith("host.")}
    assert {finding.check for finding in findings} == ids
    assert not [f for f in findings if f.verdict is Verdict.fail]


def test_quick_leaves_out_what_takes_long(cpu):
    start = time.perf_counter()
    checks = {finding.check for finding in host.check(case(config=cpu, quick=True))}
    assert time.perf_counter() - start < 2.0
    assert "host.shm" in checks and not {"host.gpus", "host.clock"} & checks


SMI = """#!/bin/sh
echo "$*" >> {log}
echo "GPU-aaaa, NVIDIA H200, 570.1, 143771, 143000, 0"
"""


@pytest.mark.parametrize(("quick", "calls"), [(True, 1), (False, 2)])
def test_gpus_whose_devices_are_missing_fail_in_quick_checks_too(
    gpu, tmp_path, monkeypatch, quick, calls
):
    """As in a container that has nvidia-smi and no devices; quick asks nvidia-smi once."""
    log = tmp_path / "calls"
    (tmp_path / "nvidia-smi").write_text(SMI.format(log=log))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = the(host.check(case(config=gpu, quick=quick)), "host.gpus")
    assert_finds(finding, "host.gpus", Verdict.fail, "nvidia-smi lists 1 GPUs", "Docker: --gpus")
    assert len(log.read_text().splitlines()) == calls


class Silent:
    """Two nodes, of which one answers."""

    nodes = ("a", "b")

    resources = None

    def call_each(self, function, arguments, timeout_s):
        del arguments, timeout_s
        return {"a": ProbeResult(function()), "b": ProbeResult(error="no answer within 30 s")}


def test_a_node_that_does_not_answer_is_named(cpu):
    findings = host.check(case(config=cpu, agents=Silent(), quick=True))
    (silent,) = [f for f in findings if f.node == "b"]
    assert_finds(silent, "host.limits", Verdict.fail, "no answer within 30 s", "ssh b")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("RAY_DEBUG_POST_MORTEM", "1", "waits for a debugger"),
        ("RAY_PDB", "1", "RAY_PDB=1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "slow"),
        ("OMP_NUM_THREADS", "1", "OMP_NUM_THREADS=1"),
        ("TORCHELASTIC_RUN_ID", "x", "of torchrun"),
    ],
)
def test_a_troublesome_variable_is_named(cpu, monkeypatch, name, value, why):
    monkeypatch.setenv(name, value)
    finding = the(host.check(case(config=cpu, quick=True)), "host.variables")
    assert_finds(finding, "host.variables", Verdict.warn, why, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_P2P_LEVEL", "LOC"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_IB_DISABLE", "1"),
        ("NCCL_NET", "Socket"),
        ("NCCL_DEBUG", "TRACE"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
    ],
)
def test_variables_of_gpus_matter_there_alone(cpu, gpu, name, value):
    node = {"a": facts(environment={name: value})}
    finding = the(judge_variables(node, {}, gpu), "host.variables")
    assert_finds(finding, "host.variables", Verdict.warn, name, name)
    assert the(judge_variables(node, {}, cpu), "host.variables").verdict is Verdict.ok


def test_values_that_do_no_harm_pass(gpu):
    harmless = {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "WARN", "RAY_DEBUG": "1"}
    finding = the(judge_variables({"a": facts(environment=harmless)}, {}, gpu), "host.variables")
    assert finding.verdict is Verdict.ok


@pytest.mark.parametrize(
    ("environment", "evidence"),
    [
        (
            {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
            "it contradicts TORCH_NCCL_ASYNC_ERROR_HANDLING=3",
        ),
        (
            {"RAY_DEBUG": "legacy", "RAY_DEBUG_POST_MORTEM": "1"},
            "it contradicts RAY_DEBUG_POST_MORTEM=1",
        ),
    ],
)
def test_contradictions_are_named(gpu, environment, evidence):
    findings = judge_variables({"a": facts(environment=environment)}, {}, gpu)
    assert any(evidence in f.evidence and f.verdict is Verdict.warn for f in findings)


@pytest.mark.parametrize(
    ("environment", "evidence"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"},
            "HIP_VISIBLE_DEVICES=1: values differ",
        ),
        ({"ROCR_VISIBLE_DEVICES": "0"}, "Ray refuses"),
    ],
)
def test_visible_devices_that_contradict_each_other_fail(gpu, environment, evidence):
    finding = judge_visible("a", environment, gpu)
    assert_finds(finding, "host.visible_devices", Verdict.fail, evidence, "_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"CUDA_VISIBLE_DEVICES": "1,0"},
        {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"},
    ],
)
def test_visible_devices_that_agree_pass(gpu, environment):
    assert judge_visible("a", environment, gpu).verdict is Verdict.ok


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_expandable_segments_that_vllm_does_not_see_fail(gpu, name):
    finding = judge_allocator("a", {name: "expandable_segments:True"}, gpu)
    assert_finds(
        finding,
        "host.allocator",
        Verdict.fail,
        "rollout.sleep = all",
        f"unset {name}, or rollout.sleep",
    )


def test_expandable_segments_that_vllm_switches_off_warn(gpu):
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    finding = judge_allocator("a", environment, gpu)
    assert_finds(
        finding,
        "host.allocator",
        Verdict.warn,
        "turns it off",
        "unset PYTORCH_CUDA",
    )


def test_expandable_segments_without_sleep_pass(gpu, monkeypatch):
    monkeypatch.setattr(gpu.rollout, "sleep", SleepMode.none)
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert judge_allocator("a", environment, gpu).verdict is Verdict.ok


def with_torch(version, **more):
    return facts(versions={"python": "3.11.7", "torch": version, **more})


def test_the_odd_version_is_named_with_its_node():
    nodes = {"a": with_torch("2.11.0"), "b": with_torch("2.11.0"), "c": with_torch("2.10.0")}
    finding = the(judge_versions(nodes), "host.versions")
    assert finding.node == "c"
    evidence = "torch 2.10.0 here, torch 2.11.0 on a and 1 more"
    assert_finds(finding, "host.versions", Verdict.fail, evidence, "pip install torch==2.11.0")


def test_of_two_nodes_the_drivers_version_counts():
    nodes = {"a": with_torch("2.11.0"), "b": with_torch("2.11.0", vllm="0.25.1")}
    finding = the(judge_versions(nodes), "host.versions")
    assert finding.node == "b"
    evidence = "vllm 0.25.1 here, vllm none on a"
    assert_finds(finding, "host.versions", Verdict.fail, evidence, "pip uninstall vllm on")


def test_a_first_node_that_is_the_odd_one_is_told_the_others_version():
    nodes = {"a": with_torch("2.10.0"), "b": with_torch("2.11.0"), "c": with_torch("2.11.0")}
    finding = the(judge_versions(nodes), "host.versions")
    evidence = "torch 2.10.0 here, torch 2.11.0 on b and 1 more"
    assert finding.node == "a"
    assert_finds(finding, "host.versions", Verdict.fail, evidence, "pip install torch==2.11.0")


def test_another_driver_warns():
    nodes = {"a": with_torch("2.11.0", driver="570"), "b": with_torch("2.11.0", driver="550")}
    finding = the(judge_versions(nodes), "host.versions")
    assert_finds(finding, "host.versions", Verdict.warn, "driver 550 here", "the same driver")


def test_workers_that_give_way_to_other_programs_are_named(cpu):
    """As those of a Ray that was started without RAY_worker_niceness."""
    finding = the(judge_variables({"a": facts(niceness=15)}, {}, cpu), "host.variables")
    assert_finds(finding, "host.variables", Verdict.warn, "niceness 15", "RAY_worker_niceness=0")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("NCCL_ALGO", ("Ring", "Tree", "Ring")),
        ("NCCL_IB_DISABLE", ("0", "1", "0")),
        ("GLOO_DEVICE_TRANSPORT", ("tcp", None, "tcp")),
    ],
)
def test_communication_variables_that_differ_are_named(name, values):
    nodes = {
        node: facts(environment={} if value is None else {name: value})
        for node, value in zip("abc", values, strict=True)
    }
    finding = the(judge_communication(nodes), "host.communication_variables")
    assert finding.node == "b"
    evidence = f"{name}={values[1] or '(unset)'} here, {name}={values[0]} on a and 1 more"
    assert_finds(
        finding,
        "host.communication_variables",
        Verdict.fail,
        evidence,
        f"Set {name} the same on all nodes",
    )


@pytest.mark.parametrize("name", ["NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG"])
def test_what_belongs_to_a_node_may_differ_where_nodes_do(name):
    nodes = {node: facts(environment={name: value}) for node, value in (("a", "x"), ("b", "y"))}
    finding = the(judge_communication(nodes), "host.communication_variables")
    assert finding.verdict is Verdict.ok
    assert f"{name}=y here, {name}=x on a" in finding.evidence


def test_equal_communication_variables_are_listed():
    nodes = dict.fromkeys("ab", facts(environment={"NCCL_ALGO": "Ring"}))
    finding = the(judge_communication(nodes), "host.communication_variables")
    assert (finding.verdict, finding.evidence) == (Verdict.ok, "NCCL_ALGO=Ring")


@pytest.mark.parametrize(("skew", "verdict"), [(2.5, Verdict.warn), (-90.0, Verdict.fail)])
def test_a_clock_that_is_wrong_is_named(skew, verdict):
    (finding,) = judge_clocks({"a": 0.0, "b": skew})
    assert finding.node == "b"
    side = "ahead of" if skew > 0 else "behind"
    assert_finds(
        finding, "host.clock", verdict, f"{abs(skew):.1f} s {side} the driver's", "chronyc makestep"
    )


class Clocks:
    """Nodes that answer late, with clocks that are off by so many seconds."""

    def __init__(self, **offsets):
        self.offsets = offsets
        self.nodes = list(offsets)

    resources = None

    def call_each(self, function, arguments, timeout_s):
        del timeout_s
        answers = {}
        for node in arguments:
            time.sleep(0.03)
            answers[node] = ProbeResult(function() + self.offsets[node])
        return answers


def test_slow_answers_are_no_skew():
    skews = clock_skews(Clocks(a=0.0, b=0.0, c=5.0, d=-5.0))
    assert skews["a"] == skews["b"] == 0.0
    assert 4.8 < skews["c"] <= 5.0
    assert -5.0 <= skews["d"] < -4.8


@pytest.mark.parametrize(("devices", "verdict"), [(("mlx5_0",), Verdict.fail), ((), Verdict.ok)])
def test_little_locked_memory_fails_beside_infiniband(devices, verdict):
    (finding,) = judge_ulimits("a", Ulimits(65536, 65536, 64 * 2**10, None), 8, devices)
    assert finding.verdict is verdict
    assert "--ulimit memlock=-1" in finding.advice or verdict is Verdict.ok


def test_cgroup_v2_is_read_up_to_its_root(tmp_path):
    """Files as Linux writes them: the narrowest limit is not the process's own group's."""
    group = tmp_path / "sys/fs/cgroup/system.slice/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/job\n")
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("max 100000\n")
    around = group.parent
    (around / "memory.max").write_text("8000\n")
    (around / "memory.current").write_text("7000\n")
    (around / "memory.stat").write_text("anon 5000\ninactive_file 1500\nactive_file 500\n")
    (around / "cpu.max").write_text("250000 100000\n")
    (around / "pids.max").write_text("400\n")
    (around / "pids.current").write_text("30\n")
    found = cgroup_facts(tmp_path)
    assert (found.memory.limit, found.memory.used, found.memory.left) == (8000, 5000, 3000)
    assert found.cores == 2.5
    assert found.threads.left == 370


def test_the_fingerprint_is_of_all_sources_of_the_package(monkeypatch):
    found = []
    monkeypatch.setattr(Path, "rglob", lambda self, _: found.append(self) or [])
    versions()
    assert found == [Path(hybridrl.__file__).parent]


H200 = Smi("GPU-aaaa", "NVIDIA H200", "570.1", 143771, 143000, 0, False)


def test_nvidia_smi_lines_are_read():
    text = "GPU-aaaa, NVIDIA H200, 570.1, 143771, 143000, 0\nGPU-b, H200, 570.1, [N/A], 1, 0\n"
    assert parse(text, [False, False]) == [H200]


@pytest.mark.parametrize(
    ("found", "evidence", "advice"),
    [
        (GPUFacts([H200], seen=(), visible=None), "a process sees not GPU-aaaa", "--gpus all"),
        (GPUFacts([H200], look_error="cuInit returned 100"), "CUDA none: cuInit", "--gpus all"),
        (GPUFacts([H200], seen=(), visible="-1"), "a process sees 0 GPUs", "CUDA_VISIBLE_DEVICES"),
        (GPUFacts([H200], seen=(), visible=""), "(CUDA_VISIBLE_DEVICES=)", "CUDA_VISIBLE_DEVICES"),
        (GPUFacts(None, "nvidia-smi: Driver/library version mismatch"), "mismatch", "dmesg"),
    ],
)
def test_gpus_that_a_process_does_not_see_fail(gpu, found, evidence, advice):
    (finding,) = judge_gpus("a", found, gpu, 1)
    assert_finds(finding, "host.gpus", Verdict.fail, evidence, advice)


def test_gpus_that_are_seen_pass_and_sick_ones_warn(gpu):
    (finding,) = judge_gpus("a", GPUFacts([H200], seen=("GPU-aaaa",)), gpu, 1)
    assert finding.verdict is Verdict.ok
    sick = H200._replace(slowed=True, ecc_errors=2)
    hot, faulty = judge_gpus("a", GPUFacts([sick], seen=("GPU-aaaa",)), gpu, 1)
    assert_finds(hot, "host.gpus", Verdict.warn, "slowed down", "TEMPERATURE")
    assert_finds(faulty, "host.gpus", Verdict.warn, "2 uncorrected memory errors", "ECC")


def test_visible_devices_do_not_stop_a_run_on_cpus(cpu):
    finding = judge_visible("a", {"ROCR_VISIBLE_DEVICES": "0"}, cpu)
    evidence = "Ray refuses to start with ROCR_VISIBLE_DEVICES (hardware = cpu"
    assert_finds(finding, "host.visible_devices", Verdict.warn, evidence, "unset ROCR_VISIBLE")
