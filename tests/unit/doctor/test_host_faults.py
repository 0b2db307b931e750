"""The first stage on machines with a fault, each made for real: mounts, cgroups, limits."""

import os
import resource
import subprocess
import sys

import pytest

from hybridrl.config.choices import Accelerator
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.host.limits import (
    judge_cgroup,
    judge_shm,
    judge_temporary,
    judge_ulimits,
)
from hybridrl.doctor.host.variables import judge_terminal
from tests.support.host_cases import assert_finds, cgroup, probe, probe_mounted

pytestmark = pytest.mark.full

FACTS = "hybridrl.doctor.host.facts"
MIB = 2**20


def test_tiny_shared_memory_fails():
    room = probe_mounted(
        FACTS, "disk_space(SHARED_MEMORY)", "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    )
    finding = judge_shm("a", room, Accelerator.cpu)
    assert_finds(
        finding, "host.shm", Verdict.fail, "/dev/shm has 64 MiB free of 64 MiB", "--shm-size=16g"
    )


def test_shared_memory_that_others_fill_fails():
    mounts = "mount -t tmpfs -o size=210m tmpfs /dev/shm; fallocate -l 30m /dev/shm/left_over"
    room = probe_mounted(FACTS, "disk_space(SHARED_MEMORY)", mounts)
    finding = judge_shm("a", room, Accelerator.cpu)
    assert_finds(finding, "host.shm", Verdict.fail, "has 180 MiB free of 210 MiB", "ls -l /dev/shm")


def test_shared_memory_too_small_for_the_store_warns():
    mounts = "mount -t tmpfs -o size=1g tmpfs /dev/shm"
    room = probe_mounted(FACTS, "disk_space(SHARED_MEMORY)", mounts)
    assert judge_shm("a", room, Accelerator.cpu).verdict is Verdict.ok
    finding = judge_shm("a", room, Accelerator.gpu)
    assert_finds(
        finding, "host.shm", Verdict.warn, "gets 512 MiB of it and wants 2.0 GiB", "--shm-size"
    )


@pytest.mark.parametrize(
    ("soft", "hard", "verdict"), [(512, 512, Verdict.fail), (2000, 4000, Verdict.warn)]
)
def test_few_open_files(soft, hard, verdict):
    limits = probe(FACTS, "limits()", before=f"ulimit -Sn {soft}; ulimit -Hn {hard}")
    (finding,) = judge_ulimits("a", limits, 1, ())
    assert_finds(
        finding, "host.limits", verdict, f"ulimit -n {soft}, hard {hard}", "ulimit -n 65536"
    )


def test_a_low_soft_limit_of_open_files_is_raised_by_ray():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = probe(FACTS, "limits()", before="ulimit -Sn 512")
    assert limits.open_files == 512 and limits.open_files_hard == hard
    (finding,) = judge_ulimits("a", limits._replace(open_files_hard=65536), 1, ())
    assert finding.verdict is Verdict.ok


def test_a_memory_cgroup_that_is_nearly_full_warns():
    """The probe sees the limit of its own group, and what the group uses."""
    fill = (
        "[cgroup_facts(), bytearray(int(0.93 * cgroup_facts().memory.left)), cgroup_facts()][::2]"
    )
    with cgroup("memory", memory__limit_in_bytes=str(256 * MIB)) as join:
        empty, full = probe(FACTS, fill, before=join)
    assert empty.memory.limit == full.memory.limit == 256 * MIB
    assert judge_cgroup("a", empty, 2, 1)[0].verdict is Verdict.ok
    (finding,) = judge_cgroup("a", full, 2, 1)
    assert_finds(
        finding,
        "host.cgroup",
        Verdict.warn,
        "of the 256 MiB that /sys/fs/cgroup/memory/",
        "--mem=0",
    )


def test_page_cache_does_not_count_as_used(tmp_path):
    file = tmp_path / "file"
    write = f"[open('{file}', 'wb').write(bytes(100 << 20)), cgroup_facts()][1]"
    with cgroup("memory", memory__limit_in_bytes=str(400 * MIB)) as join:
        facts = probe(FACTS, write, before=join)
    assert facts.memory.used < 80 * MIB


def test_a_cpu_quota_below_the_workers_warns():
    with cgroup("cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000") as join:
        facts = probe(FACTS, "cgroup_facts()", before=join)
    assert facts.cores == 1.5
    assert judge_cgroup("a", facts, 8, 1)[0].verdict is Verdict.ok
    (finding,) = judge_cgroup("a", facts, 8, 4)
    assert_finds(
        finding, "host.cgroup", Verdict.warn, "CPU quota: 1.5 of 8 cores", "--cpus-per-task"
    )


def test_a_cpuset_below_the_workers_warns():
    cores = probe(FACTS, "host_facts().cores", before="taskset -p -c 0 $$ > /dev/null")
    (finding,) = judge_cgroup("a", probe(FACTS, "cgroup_facts()"), cores, 2)
    assert_finds(
        finding, "host.cgroup", Verdict.warn, "cpuset or affinity: 1 cores", "--cpus-per-task"
    )


def test_a_cgroup_of_few_processes_fails():
    with cgroup("pids", pids__max="100") as join:
        facts = probe(FACTS, "cgroup_facts()", before=join)
    (finding,) = judge_cgroup("a", facts, 8, 1)
    assert_finds(
        finding, "host.cgroup", Verdict.fail, "allows 100 processes and threads", "--pids-limit=-1"
    )


def test_a_temporary_folder_that_is_read_only_fails(tmp_path):
    mounts = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    folders = probe_mounted(FACTS, "temporary()", mounts, TMPDIR=str(tmp_path))
    finding = next(f for f in judge_temporary("a", folders) if "written" in f.evidence)
    assert_finds(
        finding, "host.temporary", Verdict.fail, f"{tmp_path}: Read-only file system", "set TMPDIR"
    )


def test_a_small_temporary_folder_warns(tmp_path):
    mounts = f"mount -t tmpfs -o size=100m tmpfs {tmp_path}"
    folders = probe_mounted(FACTS, "temporary()", mounts, TMPDIR=str(tmp_path))
    finding = judge_temporary("a", folders)[0]
    assert_finds(
        finding, "host.temporary", Verdict.warn, f"{tmp_path} has 100 MiB free", "larger local disk"
    )


def test_a_temporary_folder_with_too_long_a_path_fails(tmp_path):
    folder = tmp_path / ("d" * 80)
    folder.mkdir()
    folders = probe(FACTS, "temporary()", TMPDIR=str(folder))
    (finding,) = judge_temporary("a", folders)
    assert_finds(
        finding,
        "host.temporary",
        Verdict.fail,
        "sockets below it may have 107",
        "export TMPDIR=/tmp",
    )


GUARDED = "hybridrl.controller.output import guard_standard_output; guard_standard_output()"


@pytest.mark.parametrize(
    ("unbuffered", "before", "held_back"),
    [("", "", True), ("1", "", False), ("", f"from {GUARDED}; ", False)],
    ids=["a program of one's own", "unbuffered", "hybridrl's commands"],
)
def test_output_of_a_slurm_job_that_waits_in_a_buffer_warns(unbuffered, before, held_back):
    """Its output goes to a file; hybridrl's own commands print line by line all the same."""
    look = f"{before}from {FACTS} import buffers_output; print(buffers_output())"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", look]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout == f"{held_back}\n"
    finding = judge_terminal("a", {"SLURM_JOB_ID": "77"}, buffered=held_back)
    verdict, advice = (Verdict.warn, "export PYTHONUNBUFFERED=1") if held_back else (Verdict.ok, "")
    assert_finds(finding, "host.terminal", verdict, "Slurm job 77", advice)
    assert judge_terminal("a", {}, buffered=held_back).verdict is Verdict.ok


def test_the_probes_import_nothing_heavy():
    modules = "import sys; import hybridrl.doctor.host.stage; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", modules], capture_output=True, text=True)
    assert not {"torch", "ray", "vllm", "transformers"} & set(answer.stdout.split())
    assert "hybridrl.doctor.host.stage" in answer.stdout.split()
