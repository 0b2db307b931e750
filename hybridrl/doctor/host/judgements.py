"""What a node's limits and room mean for a run."""

from collections.abc import Iterator, Mapping

from hybridrl.config.choices import Accelerator
from hybridrl.config.planner.memory import MIB, gib
from hybridrl.config.schema import RunConfig
from hybridrl.controller.processes import STORE_BYTES
from hybridrl.doctor.findings import Finding, fail, ok, skipped, warn
from hybridrl.doctor.host.cgroup import CgroupFacts
from hybridrl.doctor.host.facts import HostFacts, Limits, Room, Temporary

# Ray's smallest object store, and what NCCL and vLLM's tensor parallelism take beside it.
SHM_NEEDED = 200 * MIB
# The store is given at most half of what is free (controller/ray/runtime.py).
STORE_SHARE = 2
# Ray raises the number of open files to this where it may, and complains below the next
# (ray/_private/worker.py); a Ray of one node alone has some hundred sockets open.
RAY_OPEN_FILES, FEW_OPEN_FILES, TOO_FEW_OPEN_FILES = 65536, 8192, 1024
# Ray's own processes on a node, and one of the run's with torch, vLLM and NCCL.
RAY_THREADS, THREADS_EACH = 1024, 256
TOO_FEW_THREADS = 256
# Of a cgroup's memory.
NEARLY_FULL = 0.9
TEMPORARY_NEEDED = 1024 * MIB
# The longest path of a socket is 107 bytes; below the temporary folder multiprocessing makes
# pymp-xxxxxxxx/listener-xxxxxxxx.
LONGEST_TEMPORARY = 107 - 33
# Seconds that the clocks of two nodes may differ.
ODD_CLOCK_S, WRONG_CLOCK_S = 1.0, 60.0
MORE_SHM = (
    "Docker: docker run --shm-size=16g (or --ipc=host); Kubernetes: mount an emptyDir with "
    "medium: Memory at /dev/shm; elsewhere: mount -o remount,size=16G /dev/shm. Files that dead "
    "runs have left there: ls -l /dev/shm"
)


def judge_host(
    facts: Mapping[str, HostFacts], config: RunConfig, slots_on: Mapping[str, int]
) -> list[Finding]:
    """All checks of each node that need no GPU and no environment.

    Args:
        facts: by node.
        config: of the run.
        slots_on: ranks that each node may get.
    """
    found: list[Finding] = []
    for node, fact in facts.items():
        found.append(judge_shm(node, fact.shared_memory, config.hardware.accelerator))
        slots = slots_on[node]
        infiniband = fact.infiniband if config.cluster.nodes > 1 and slots else ()
        found += judge_limits(node, fact.limits, slots, infiniband)
        found += judge_cgroup(node, fact.cgroup, fact.cores, slots)
        found += judge_temporary(node, fact.temporary)
    return found


def judge_shm(node: str, room: Room | None, accelerator: Accelerator) -> Finding:
    """host.shm."""
    check = "host.shm"
    if room is None:
        return fail(check, node, "there is no /dev/shm", MORE_SHM)
    wanted = STORE_BYTES[accelerator]
    has = f"/dev/shm has {gib(room.free)} free of {gib(room.total)}"
    if room.free < SHM_NEEDED:
        evidence = f"{has}; Ray's object store, NCCL and vLLM need {gib(SHM_NEEDED)}"
        return fail(check, node, evidence, MORE_SHM)
    if room.free < STORE_SHARE * wanted:
        store = gib(room.free / STORE_SHARE)
        evidence = f"{has}; Ray's object store gets {store} of it and wants {gib(wanted)}"
        return warn(check, node, evidence, MORE_SHM)
    return ok(check, node, has)


def judge_limits(
    node: str, limits: Limits, slots: int, infiniband: tuple[str, ...]
) -> Iterator[Finding]:
    """host.limits.

    Args:
        node: its name.
        limits: what ulimit shows there.
        slots: the run's processes on a node.
        infiniband: devices that the run may use.
    """
    check = "host.limits"
    problems = [*_open_files(node, limits), *_threads(node, limits, slots)]
    if infiniband and limits.locked_bytes is not None:
        problems.append(
            fail(
                check,
                node,
                f"{gib(limits.locked_bytes)} of locked memory (ulimit -l) beside "
                f"{', '.join(infiniband)}: NCCL registers its buffers with them",
                "docker run --ulimit memlock=-1; Slurm: LimitMEMLOCK=infinity in slurmd.service; "
                "elsewhere: '* - memlock unlimited' in /etc/security/limits.conf",
            )
        )
    yield from problems
    if not problems:
        locked = "unlimited" if limits.locked_bytes is None else gib(limits.locked_bytes)
        yield ok(
            check,
            node,
            f"open files {_limit(limits.open_files)} (hard {_limit(limits.open_files_hard)}), "
            f"locked memory {locked}, threads {_limit(limits.threads)}",
        )


def _open_files(node: str, limits: Limits) -> Iterator[Finding]:
    if limits.open_files is None:
        return
    hard = RAY_OPEN_FILES if limits.open_files_hard is None else limits.open_files_hard
    files = max(limits.open_files, min(hard, RAY_OPEN_FILES))
    evidence = (
        f"{files} files may be open (ulimit -n {limits.open_files}, hard {_limit(hard)}); "
        f"Ray asks for {FEW_OPEN_FILES} at least"
    )
    advice = (
        f"ulimit -n {RAY_OPEN_FILES}; docker run --ulimit nofile={RAY_OPEN_FILES}; Slurm: "
        "LimitNOFILE in slurmd.service; elsewhere: nofile in /etc/security/limits.conf"
    )
    if files < TOO_FEW_OPEN_FILES:
        yield fail("host.limits", node, evidence, advice)
    elif files < FEW_OPEN_FILES:
        yield warn("host.limits", node, evidence, advice)


def _threads(node: str, limits: Limits, slots: int) -> Iterator[Finding]:
    wanted = RAY_THREADS + slots * THREADS_EACH
    if limits.threads is not None and limits.threads < wanted:
        verdict = fail if limits.threads < TOO_FEW_THREADS else warn
        yield verdict(
            "host.limits",
            node,
            f"{limits.threads} processes and threads (ulimit -u); Ray and {slots} workers have "
            f"about {wanted}",
            "ulimit -u unlimited; Slurm: LimitNPROC=infinity in slurmd.service; elsewhere: nproc "
            "in /etc/security/limits.conf",
        )


def judge_cgroup(node: str, facts: CgroupFacts, cores: int, slots: int) -> Iterator[Finding]:
    """host.cgroup.

    Args:
        node: its name.
        facts: limits there.
        cores: that processes may run on.
        slots: the run's processes on a node.
    """
    problems = [
        *_memory(node, facts),
        *_cores(node, facts, cores, slots),
        *_pids(node, facts, slots),
    ]
    yield from problems
    if not problems:
        memory = "no limit of memory"
        if facts.memory is not None:
            memory = f"{gib(facts.memory.used)} of {gib(facts.memory.limit)} of memory used"
        quota = "no CPU quota" if facts.cores is None else f"CPU quota {facts.cores:g}"
        yield ok("host.cgroup", node, f"{memory}, {quota}, {cores} cores")


def _memory(node: str, facts: CgroupFacts) -> Iterator[Finding]:
    memory = facts.memory
    if memory is not None and memory.used > NEARLY_FULL * memory.limit:
        yield warn(
            "host.cgroup",
            node,
            f"{gib(memory.used)} of the {gib(memory.limit)} that {memory.group} allows are used; "
            f"the kernel kills what goes beyond",
            "End what uses it, or ask for more: Slurm: sbatch --mem=0; docker run --memory=...; "
            "Kubernetes: resources.limits.memory",
        )


def _cores(node: str, facts: CgroupFacts, cores: int, slots: int) -> Iterator[Finding]:
    usable = cores if facts.cores is None else min(facts.cores, cores)
    if usable >= slots:
        return
    why = f"cpuset or affinity: {cores} cores"
    if facts.cores is not None and facts.cores < cores:
        why = f"CPU quota: {facts.cores:g} of {cores} cores"
    yield warn(
        "host.cgroup",
        node,
        f"{why}, for {slots} worker processes and Ray's own",
        "Slurm: sbatch --cpus-per-task=...; docker run --cpus=...; Kubernetes: "
        "resources.limits.cpu; or lower cluster.gpus_per_node",
    )


def _pids(node: str, facts: CgroupFacts, slots: int) -> Iterator[Finding]:
    threads, wanted = facts.threads, RAY_THREADS + slots * THREADS_EACH
    if threads is not None and threads.left < wanted:
        verdict = fail if threads.left < TOO_FEW_THREADS else warn
        yield verdict(
            "host.cgroup",
            node,
            f"{threads.group} allows {threads.limit} processes and threads, {threads.used} are "
            f"there; Ray and {slots} workers have about {wanted}",
            "docker run --pids-limit=-1; Slurm: TasksMax=infinity in slurmd.service; Kubernetes: "
            "the kubelet's podPidsLimit",
        )


def judge_temporary(node: str, folders: tuple[Temporary, ...]) -> Iterator[Finding]:
    """host.temporary."""
    problems = [finding for folder in folders for finding in _folder(node, folder)]
    yield from problems
    if not problems:
        has = ", ".join(f"{gib(f.room.free)} free in {f.room.folder}" for f in folders)
        yield ok("host.temporary", node, has)


def _folder(node: str, temporary: Temporary) -> Iterator[Finding]:
    check, (path, _, free) = "host.temporary", temporary.room
    if temporary.error:
        yield fail(
            check,
            node,
            f"no file can be written in {path}: {temporary.error}",
            f"mkdir -p {path}; chmod 1777 {path}; or set TMPDIR to a folder that can be written",
        )
    elif free < TEMPORARY_NEEDED:
        yield warn(
            check,
            node,
            f"{path} has {gib(free)} free; Ray's logs and spilled objects, and compiled kernels, "
            f"take {gib(TEMPORARY_NEEDED)}",
            f"Delete what is old there (du -xsh {path}/*), or set TMPDIR to a larger local disk",
        )
    if len(path.encode()) > LONGEST_TEMPORARY:
        yield fail(
            check,
            node,
            f"{path} has {len(path.encode())} bytes; sockets below it may have 107, so it may have "
            f"{LONGEST_TEMPORARY}",
            "Set TMPDIR to a shorter path: export TMPDIR=/tmp",
        )


def judge_terminal(driver: str, environment: Mapping[str, str], *, held_back: bool) -> Finding:
    """host.terminal: of the process that prints; ranks write to files of the run, line by line.

    Args:
        driver: the node on which the run is started.
        environment: of this process.
        held_back: whether what it prints waits in a buffer, as only a program other than
            hybridrl's own commands lets it.
    """
    check, job = "host.terminal", environment.get("SLURM_JOB_ID")
    if job and held_back:
        return warn(
            check,
            driver,
            f"this program of Slurm job {job} prints through a buffer: the job would be RUNNING "
            f"for long without output, and lose the last lines when it is killed",
            "Put export PYTHONUNBUFFERED=1 into the batch script, or start the run by python -m "
            "hybridrl.main, which prints each line at once",
        )
    how = "in a buffer until it is full" if held_back else "line by line"
    where = f"Slurm job {job}" if job else "not under Slurm"
    return ok(check, driver, f"{where}, output {how}; nothing asks for a terminal")


def judge_clocks(skews: Mapping[str, float]) -> list[Finding]:
    """host.clock.

    Args:
        skews: seconds by which a node's clock differs at least from the driver's.
    """
    check = "host.clock"
    found: list[Finding] = []
    for node, skew in skews.items():
        if abs(skew) <= ODD_CLOCK_S:
            continue
        verdict = fail if abs(skew) > WRONG_CLOCK_S else warn
        found.append(
            verdict(
                check,
                node,
                f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the "
                f"driver's; log lines, time limits and certificates go by it",
                "chronyc makestep (or systemctl restart systemd-timesyncd) on that node; then "
                "chronyc tracking",
            )
        )
    if not found and len(skews) > 1:
        worst = max(map(abs, skews.values()))
        found.append(ok(check, "all", f"{len(skews)} clocks, at least {worst:.3f} s apart"))
    if not found:
        found.append(skipped(check, "all", "there is one node"))
    return found


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)
