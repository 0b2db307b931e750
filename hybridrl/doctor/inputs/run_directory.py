"""Check inputs.run_directory: each node can write there, and all see the same files."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from hybridrl.controller.ray.node_probes import NodeProbes
from hybridrl.doctor.findings import Finding, fail, ok, warn
from hybridrl.doctor.gather import gather
from hybridrl.doctor.host.facts import existing

CHECK = "inputs.run_directory"
REMOVE_S = 30.0


def check_run_directory(agents: NodeProbes, folder: str) -> list[Finding]:
    """Write a file on each node, and look for the first node's file on all."""
    planted, found = gather(agents, CHECK, plant, folder)
    advice = f"Make it writable (chown, chmod), or set hydra.run.dir=/shared/run (now {folder})"
    found += [
        fail(CHECK, node, f"{path}: {error}", advice)
        for node, (path, error) in planted.items()
        if error
    ]
    written = {node: (path,) for node, (path, error) in planted.items() if not error}
    first, *others = agents.nodes
    if others and first in written:
        seen, silent = gather(agents, CHECK, sees, *written[first])
        found += silent
        found += [
            warn(
                CHECK,
                node,
                f"this node does not see files that {first} writes into {folder}: checkpoints need "
                "a shared folder, and logs stay on their nodes",
                "hydra.run.dir=/shared/..., on NFS, Lustre or the like",
            )
            for node, is_seen in seen.items()
            if not is_seen
        ]
    agents.call_each(remove, written, timeout_s=REMOVE_S)
    return found or [
        ok(CHECK, "all", f"{folder}: writable{', shared by all nodes' * bool(others)}")
    ]


def plant(folder: str) -> tuple[str, str]:
    """Write a file into a folder or its nearest existing parent; return its path and the error."""
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
    """Return True if a planted file exists with its contents."""
    try:
        return Path(path).read_text() == path
    except OSError:
        return False


def remove(path: str) -> None:
    """Delete a planted file."""
    with suppress(OSError):
        Path(path).unlink()
