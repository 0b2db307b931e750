"""Rules for the limits and free space of a node."""

import math

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.machine import STORE_BYTES
from hybridrl.config.planner.memory import MIB, gib
from hybridrl.doctor.findings import (
    Finding,
    Rule,
    apply,
    fail,
    fails_if,
    first,
    severity,
    warns_if,
)
from hybridrl.doctor.host.facts import CgroupFacts, DiskSpace, Ulimits

# Ray's smallest object store, plus the shared memory of NCCL and vLLM.
SHM_NEEDED = 200 * MIB
# The store gets at most half of the free shared memory (controller/ray/runtime.py).
STORE_SHARE = 2
# Ray raises its number of open files to the first, and warns below the second
# (ray/_private/worker.py); a Ray of one node has some hundred sockets open.
RAY_OPEN_FILES, FEW_OPEN_FILES, TOO_FEW_OPEN_FILES = 65536, 8192, 1024
# Threads of Ray on a node, and of a worker with torch, vLLM and NCCL.
RAY_THREADS, THREADS_EACH = 1024, 256
TOO_FEW_THREADS = 256
# Share of a cgroup's memory.
NEARLY_FULL = 0.9
TEMPORARY_NEEDED = 1024 * MIB
# A socket's path has at most 107 bytes; multiprocessing appends
# pymp-xxxxxxxx/listener-xxxxxxxx.
LONGEST_TEMPORARY = 107 - 33
MORE_SHM = (
    "docker run --shm-size=16g; Kubernetes: an emptyDir with medium: Memory at /dev/shm; or mount "
    "-o remount,size=16G /dev/shm. Files of dead runs: ls -l /dev/shm"
)
MORE_MEMORY = "End others, or Slurm: --mem=0; docker run --memory; Kubernetes: limits.memory"
MORE_CORES = "Slurm: --cpus-per-task; docker run --cpus; Kubernetes: limits.cpu; or fewer ranks"
MORE_PIDS = "docker run --pids-limit=-1; Slurm: TasksMax=infinity; Kubernetes: podPidsLimit"


def judge_shm(node: str, space: DiskSpace | None, accelerator: Accelerator) -> Finding:
    """Judge host.shm."""
    if space is None:
        return fail("host.shm", node, "there is no /dev/shm", MORE_SHM)
    wanted = STORE_BYTES[accelerator]
    has = f"/dev/shm has {gib(space.free)} free of {gib(space.total)}"
    need = f"{has}; Ray's object store, NCCL and vLLM need {gib(SHM_NEEDED)}"
    gets = f"{has}; Ray's object store gets {gib(space.free / STORE_SHARE)} of it and wants "
    rules: list[Rule] = [
        (fails_if(space.free < SHM_NEEDED), need, MORE_SHM),
        (warns_if(space.free < STORE_SHARE * wanted), f"{gets}{gib(wanted)}", MORE_SHM),
    ]
    return first("host.shm", node, rules, has)


def judge_ulimits(
    node: str, limits: Ulimits, slots: int, infiniband: tuple[str, ...]
) -> list[Finding]:
    """Judge host.limits of a node with this number of ranks and these InfiniBand devices."""
    soft, hard, _, threads = ("unlimited" if value is None else str(value) for value in limits)
    locked = "unlimited" if limits.locked_bytes is None else gib(limits.locked_bytes)
    may = RAY_OPEN_FILES if limits.open_files_hard is None else limits.open_files_hard
    files = max(limits.open_files or RAY_OPEN_FILES, min(may, RAY_OPEN_FILES))
    rules: list[Rule] = [
        (
            severity(files < TOO_FEW_OPEN_FILES, files < FEW_OPEN_FILES),
            f"{files} files may be open (ulimit -n {soft}, hard {hard}); Ray needs at least "
            f"{FEW_OPEN_FILES}",
            _more("n", str(RAY_OPEN_FILES), "nofile", "LimitNOFILE"),
        ),
        _threads_rule(
            limits.threads,
            slots,
            f"{threads} processes and threads (ulimit -u)",
            _more("u", "unlimited", "nproc", "LimitNPROC"),
        ),
        (
            fails_if(infiniband and limits.locked_bytes is not None),
            f"locked memory is limited to {locked} (ulimit -l); NCCL registers its buffers with "
            f"{', '.join(infiniband)}",
            _more("l", "unlimited", "memlock", "LimitMEMLOCK"),
        ),
    ]
    passed = f"open files {soft} (hard {hard}), locked memory {locked}, threads {threads}"
    return apply("host.limits", node, rules, passed)


def _more(letter: str, value: str, name: str, slurm: str) -> str:
    """Return the remedy for a low limit, by its names in ulimit, limits.conf and systemd."""
    docker = "-1" if value == "unlimited" else value
    return (
        f"ulimit -{letter} {value}; docker run --ulimit {name}={docker}; Slurm: {slurm}=infinity "
        f"in slurmd.service; elsewhere: {name} in /etc/security/limits.conf"
    )


def _threads_rule(left: int | None, slots: int, evidence: str, advice: str) -> Rule:
    """Return the rule for the number of processes and threads that may still be made."""
    needed, has = RAY_THREADS + slots * THREADS_EACH, math.inf if left is None else left
    verdict = severity(has < TOO_FEW_THREADS, has < needed)
    return verdict, f"{evidence}; Ray and {slots} workers have about {needed}", advice


def judge_cgroup(node: str, facts: CgroupFacts, cores: int, slots: int) -> list[Finding]:
    """Judge host.cgroup of a node with this number of usable cores and ranks."""
    usable = cores if facts.cores is None else min(facts.cores, cores)
    limited = (
        f"CPU quota: {usable:g} of {cores}" if usable < cores else f"cpuset or affinity: {cores}"
    )
    evidence = f"{limited} cores, for {slots} worker processes and those of Ray"
    rules: list[Rule] = [(warns_if(usable < slots), evidence, MORE_CORES)]
    used = "no limit of memory"
    if memory := facts.memory:
        used = f"{gib(memory.used)} of {gib(memory.limit)} of memory used"
        evidence = f"{gib(memory.used)} of the {gib(memory.limit)} that {memory.group} allows are "
        evidence += "used; the kernel kills processes above it"
        rules.append((warns_if(memory.used > NEARLY_FULL * memory.limit), evidence, MORE_MEMORY))
    if threads := facts.threads:
        evidence = f"{threads.group} allows {threads.limit} processes and threads, {threads.used} "
        rules.append(_threads_rule(threads.left, slots, f"{evidence}exist", MORE_PIDS))
    quota = "no CPU quota" if facts.cores is None else f"CPU quota {facts.cores:g}"
    return apply("host.cgroup", node, rules, f"{used}, {quota}, {cores} cores")


def judge_temporary(node: str, folders: tuple[DiskSpace, ...]) -> list[Finding]:
    """Judge host.temporary."""
    rules: list[Rule] = []
    for path, _, free, error in folders:
        length = len(path.encode())
        unwritable = f"no file can be written in {path}: {error}"
        small = f"{path} has {gib(free)} free; logs, spilled objects and kernels need "
        small += gib(TEMPORARY_NEEDED)
        long = f"{path} has {length} bytes; sockets below it may have 107, so the limit is "
        make = f"mkdir -p {path}; chmod 1777 {path}; or set TMPDIR to a writable folder"
        clean = f"Delete old files (du -xsh {path}/*), or set TMPDIR to a larger local disk"
        rules += [
            (fails_if(error), unwritable, make),
            (warns_if(not error and free < TEMPORARY_NEEDED), small, clean),
            (
                fails_if(length > LONGEST_TEMPORARY),
                f"{long}{LONGEST_TEMPORARY}",
                "Set a shorter one: export TMPDIR=/tmp",
            ),
        ]
    free_in = ", ".join(f"{gib(f.free)} free in {f.folder}" for f in folders)
    return apply("host.temporary", node, rules, free_in)
