"""The memory stage: real limits of this machine, invented GPUs."""

import pytest

from hybridrl.config.planner.machine import memory_limit
from hybridrl.config.planner.memory import host_parts, on_node
from hybridrl.doctor import room
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.host.facts import Limit
from hybridrl.doctor.host.gpus import GPUFacts, Smi, parse_processes
from hybridrl.doctor.room import (
    judge_gpu_memory,
    judge_host_memory,
)
from hybridrl.doctor.stages import CheckContext
from tests.support.composing import GPU_NODE, examined
from tests.support.host_cases import assert_finds, case, cgroup, probe, the

pytestmark = pytest.mark.full

GIB = 2**30
MIB = 2**20
OFFLOADED = ("+recipe=gsm8k_ppo", "hardware=gpu", "fsdp.offload=idle_all")


@pytest.fixture(scope="module")
def cpu():
    return case()


@pytest.fixture(scope="module")
def gpu(cpu):
    """Qwen2.5-0.5B on 8 GPUs, everything idle offloaded."""
    found = examined(OFFLOADED, machine=GPU_NODE)
    assert found.shape is not None
    return CheckContext(found.config, GPU_NODE, found.shape, (), OFFLOADED, cpu.agents, quick=False)


def needed_ram(context):
    return on_node(8, sum(host_parts(context.config, context.shape).values()))


def test_this_machine_is_measured(cpu):
    findings = room.check_memory(cpu)
    left = room.host_memory().left
    assert 0 < left < memory_limit()
    assert "of RAM here" in the(findings, "memory.host").evidence
    assert the(findings, "memory.gpu").verdict is Verdict.skipped


def test_quick_looks_at_the_host_alone():
    assert [f.check for f in room.check_memory(case(quick=True))] == ["memory.host"]


def test_a_cgroup_limit_below_the_pinned_copies_fails(gpu):
    """The limit is a real one, the prediction that of a run with 8 GPUs."""
    with cgroup("memory", memory__limit_in_bytes=str(GIB)) as join:
        found = probe("hybridrl.doctor.room", "host_memory()", before=join)
    finding = judge_host_memory("b", found, gpu, 8)
    assert finding.node == "b"
    needed = needed_ram(gpu) / GIB
    assert_finds(
        finding, "memory.host", Verdict.fail, f"needs {needed:.1f} GiB of RAM", "fsdp.offload=none"
    )
    assert "of the 1.0 GiB that /sys/fs/cgroup/memory/hybridrl-test" in finding.evidence
    assert "GiB for checkpoints pinned" in finding.evidence


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.99, Verdict.fail), (1.2, Verdict.warn), (1.3, Verdict.ok)]
)
def test_each_node_is_judged_by_what_it_has_left(gpu, share, verdict):
    left = int(share * needed_ram(gpu))
    assert judge_host_memory("a", Limit("the machine", left, 0), gpu, 8).verdict is verdict


H200 = Smi("GPU-aaaa", "NVIDIA H200", "570.1", 143771, 143000, 0, False)
IDLE = GPUFacts(
    [H200._replace(uuid=f"GPU-{index}") for index in range(8)],
    seen=tuple(f"GPU-{index}" for index in range(8)),
)


def test_free_gpus_pass(gpu):
    findings = list(judge_gpu_memory("a", IDLE, gpu, 8))
    assert [finding.verdict for finding in findings] == [Verdict.ok] * 8
    assert findings[7].evidence.startswith("GPU 7: update actor needs")


def test_a_gpu_that_another_process_fills_fails_and_names_it(gpu):
    text = "GPU-1, 4711, python3, 100000\nGPU-9, 1, other, 5\n"
    gpus = [IDLE.smi[0], IDLE.smi[1]._replace(free_mib=43000)]
    facts = IDLE._replace(smi=gpus, processes=parse_processes(text))
    first, second = judge_gpu_memory("a", facts, gpu, 8)
    assert first.verdict is Verdict.ok
    assert_finds(second, "memory.gpu", Verdict.fail, "python3 (pid 4711, 100000 MiB)", "kill 4711")
    assert "42.0 GiB of 140.4 GiB are free" in second.evidence
    assert "other" not in second.evidence


def test_a_small_process_beside_the_run_warns(gpu):
    facts = IDLE._replace(smi=IDLE.smi[:1], processes=parse_processes("GPU-0, 7, Xorg, 4\n"))
    (finding,) = judge_gpu_memory("a", facts, gpu, 8)
    assert_finds(finding, "memory.gpu", Verdict.warn, "Xorg (pid 7, 4 MiB)", "kill 7")


def test_a_node_without_nvidia_smi_is_skipped_with_the_reason(gpu):
    (finding,) = judge_gpu_memory("a", GPUFacts(None, "there is no nvidia-smi"), gpu, 8)
    assert (finding.verdict, finding.evidence) == (Verdict.skipped, "there is no nvidia-smi")
