"""Cases for the doctor's first stages, healthy facts, and machines with real faults."""

import os
import pickle
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.controller.ray.node_probes import LocalProbes
from hybridrl.doctor.findings import Finding, Verdict
from hybridrl.doctor.host.facts import CgroupFacts, DiskSpace, HostFacts, Ulimits
from hybridrl.doctor.stages import CheckContext
from hybridrl.models.resolve import EMBEDDED_FOLDER
from tests.support.model_shapes import TINY
from tests.support.run_configs import MACHINE, run_config

GIB = 2**30
CGROUPS = Path("/sys/fs/cgroup")
# As if from the hub.
HUB_MODEL = "acme/tiny"


def case(
    *overrides: str, quick: bool = False, agents: Any = None, config: Any = None
) -> CheckContext:
    """The recipe on this machine alone, or on `agents`."""
    return CheckContext(
        config=config or run_config(*overrides),
        machine=MACHINE,
        shape=model_shape(TINY),
        frozen=(),
        overrides=overrides,
        agents=agents or LocalProbes("here"),
        quick=quick,
    )


def facts(**changes: Any) -> HostFacts:
    """A node where all is well, but for `changes`."""
    healthy = HostFacts(
        shared_memory=DiskSpace("/dev/shm", 16 * GIB, 16 * GIB),
        limits=Ulimits(65536, 65536, None, None),
        cgroup=CgroupFacts(None, None, None),
        cores=8,
        environment={},
        versions={"python": "3.11.7", "torch": "2.11.0", "driver": "570.1"},
        temporary=(DiskSpace("/tmp", 99 * GIB, 99 * GIB),),
        infiniband=(),
        niceness=0,
    )
    return healthy._replace(**changes)


def of(findings: list[Finding], check: str) -> list[Finding]:
    """The findings of one check."""
    return [finding for finding in findings if finding.check == check]


def the(findings: list[Finding], check: str) -> Finding:
    """The one finding of a check."""
    (finding,) = of(findings, check)
    return finding


def assert_finds(
    finding: Finding, check: str, verdict: Verdict, evidence: str, advice: str
) -> None:
    """The id, the verdict, and parts of the texts."""
    assert (finding.check, finding.verdict) == (check, verdict), finding
    assert evidence in finding.evidence
    assert advice in finding.advice


def hub_cache(home: Path, commit: str = "1" * 40) -> Path:
    """The embedded model as the snapshot of `HUB_MODEL` in a cache; returns the snapshot."""
    repository = home / "hub" / f"models--{HUB_MODEL.replace('/', '--')}"
    snapshot = Path(shutil.copytree(EMBEDDED_FOLDER, repository / "snapshots" / commit))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(commit)
    return snapshot


def require(condition: bool, reason: str) -> None:
    """Skip a test where this machine cannot make its fault; under CI=true fail it."""
    if not condition:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def need_mounts() -> None:
    """Require that processes may have file systems of their own."""
    can = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    require(can.returncode == 0, "needs mount namespaces (unshare -m)")


def probe(
    module: str,
    expression: str,
    *,
    before: str = "true",
    shell: tuple[str, ...] = ("sh", "-ec"),
    **environment: str,
) -> Any:
    """The value of an expression over a module's names, in a process of its own.

    Args:
        module: whose names it uses.
        expression: in Python; its value is plain.
        before: shell commands that make the fault, in the process that becomes Python's.
        shell: what runs them.
        environment: variables added to this process's.
    """
    code = (
        f"import pickle, sys; from {module} import *; "
        f"sys.stdout.buffer.write(pickle.dumps({expression}))"
    )
    child = subprocess.run(
        [*shell, f'{before}; exec "$0" -c "$1"', sys.executable, code],
        env=os.environ | environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode()
    return pickle.loads(child.stdout)


def probe_mounted(module: str, expression: str, mounts: str, **environment: str) -> Any:
    """As `probe`, with file systems of its own: shell commands that mount them."""
    need_mounts()
    shell = ("unshare", "-m", "sh", "-ec")
    return probe(module, expression, before=mounts, shell=shell, **environment)


@contextmanager
def cgroup(controller: str, **files: str) -> Any:
    """A cgroup (v1) of its own with limits, as the shell command that joins it."""
    base = CGROUPS / controller
    require(
        os.geteuid() == 0 and (base / "cgroup.procs").is_file() and os.access(base, os.W_OK),
        f"needs root and a cgroup v1 hierarchy at {base}",
    )
    group = base / f"hybridrl-test-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in files.items():
            (group / name.replace("__", ".")).write_text(value)
        yield f"echo $$ > {group}/cgroup.procs"
    finally:
        group.rmdir()
