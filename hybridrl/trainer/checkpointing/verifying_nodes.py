"""Verifying a checkpoint on all nodes of a cluster at once, each of which hashes its share."""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from hybridrl.checkpoint.manifest import FileRecord
from hybridrl.checkpoint.verification import Watch, digests
from hybridrl.controller.ray.node_probes import NodeProbes

log = logging.getLogger(__name__)

# A node is asked for so many files, or small ones of so many bytes, at a time, so that the user
# sees how far it is.
SHARE_FILES, SHARE_BYTES = 8, 8 * 2**30
# Seconds for a share until the driver reads it itself, and between two looks for the cluster.
SHARE_S, LOOK_S = 1800.0, 0.2


class OnNodes:
    """Confirms a checkpoint's files on the nodes of a cluster; see `verification.Confirm`.

    Args:
        agents: of the nodes, once the process has joined the cluster.
    """

    def __init__(self, agents: "Future[NodeProbes]") -> None:
        self._agents = agents

    def __call__(self, folder: Path, files: Mapping[str, FileRecord], watch: Watch) -> set[str]:
        """Return the files that some node has read as they were written."""
        size, read = sum(record.size for record in files.values()), 0
        while not self._agents.done():
            watch(folder, read, size)
            time.sleep(LOOK_S)
        agents, confirmed = self._agents.result(), set[str]()
        left = sorted(files, key=lambda name: files[name].size)
        while left:
            watch(folder, read, size)
            shares = {node: (folder, _share(left, files)) for node in agents.nodes}
            asked = {node: share for node, share in shares.items() if share[1]}
            for node, answer in agents.call_each(digests, asked, SHARE_S).items():
                found = answer.value or {}
                confirmed |= {name for name in found if found[name] == files[name]}
                read += sum(files[name].size for name in asked[node][1])
        done = f"{len(confirmed)} of {len(files)} files read by {len(agents.nodes)} nodes"
        log.info("%s: %s", folder, done)
        return confirmed


def _share(left: list[str], files: Mapping[str, FileRecord]) -> list[str]:
    """Take the largest of what is left, up to SHARE_FILES or SHARE_BYTES."""
    share, taken = list[str](), 0
    while left and (len(share) < SHARE_FILES or taken + files[left[-1]].size <= SHARE_BYTES):
        share.append(left.pop())
        taken += files[share[-1]].size
    return share
