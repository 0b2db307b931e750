"""inputs.run_directory: each node can write there, and all see the same files."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from hybridrl.controller.ray.node_probes import NodeProbes, call_all
from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.host.stage import heard

REMOVE_S = 30.0


def check_run_directory(agents: NodeProbes, folder: str) -> list[Finding]:
    """inputs.run_directory: each node can write there, and sees what the first one writes."""
    check = "inputs.run_directory"
    planted, found = heard(check, call_all(agents, plant, folder))
    for node, (path, error) in planted.items():
        if error:
            advice = (
                f"Let the run write there (chown, chmod), or name another folder: "
                f"hydra.run.dir=/shared/outputs/run (now {folder})"
            )
            found.append(fail(check, node, f"{path}: {error}", advice))
    path, error = next(iter(planted.values()), ("", "nobody answers"))
    if not error and len(agents.nodes) > 1:
        found += _shared(agents, path, folder)
    there = {node: (path,) for node, (path, error) in planted.items() if not error}
    agents.call_each(remove, there, timeout_s=REMOVE_S)
    return found or [ok(check, "all", f"{folder}: writable")]


def _shared(agents: NodeProbes, path: str, folder: str) -> list[Finding]:
    check, first = "inputs.run_directory", agents.nodes[0]
    seen, found = heard(check, call_all(agents, sees, path))
    for node in (node for node, is_seen in seen.items() if not is_seen):
        found.append(
            warn(
                check,
                node,
                f"it does not see what {first} writes into {folder}: saving needs a folder that "
                f"all nodes share, and logs stay on their nodes",
                "hydra.run.dir=/shared/..., a folder on NFS, Lustre or the like",
            )
        )
    return found or [ok(check, "all", f"{folder}: writable, and shared by all nodes")]


def existing(folder: Path) -> Path:
    """The folder, or the nearest one around it that exists."""
    there = folder.absolute()
    while not there.is_dir():
        there = there.parent
    return there


def plant(folder: str) -> tuple[str, str]:
    """Write a file into a folder or the nearest one around it; its path, and why it cannot be."""
    there = existing(Path(folder))
    try:
        descriptor, path = tempfile.mkstemp(dir=there, prefix=".hybridrl-doctor-")
        with os.fdopen(descriptor, "w") as file:
            file.write(path)
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        return str(there), error.strerror or str(error)
    return path, ""


def sees(path: str) -> bool:
    """Whether a planted file is there, and holds what was written."""
    try:
        return Path(path).read_text() == path
    except OSError:
        return False


def remove(path: str) -> None:
    """Take a planted file away again."""
    with suppress(OSError):
        Path(path).unlink()
