"""Several nodes hash a checkpoint together; what they say never makes a good file bad."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hybridrl.checkpoint import verification
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.verification import Verify, newest_good, verify
from hybridrl.controller.ray.node_probes import LocalProbes, ProbeResult
from hybridrl.trainer.checkpointing import verification as on_cluster
from hybridrl.trainer.checkpointing.verification import ClusterVerification
from tests.support.checkpoint_cases import FILES, SHARDS, save

pytestmark = pytest.mark.full


class Nodes:
    """Two nodes, threads of this process.

    Args:
        blind: the second one sees none of the files.

    Attributes:
        read: names of the files that each was asked for.
    """

    def __init__(self, *, blind: bool = False) -> None:
        self.nodes, self.addresses, self.resources = ["a", "b"], {}, None
        self.read: dict[str, list[str]] = {"a": [], "b": []}
        self._blind = blind

    def call_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, tuple[Any, ...]],
        timeout_s: float,
    ) -> dict[str, ProbeResult]:
        answers = {}
        for node, (folder, names) in arguments.items():
            self.read[node] += names
            seen = Path("/nowhere") if self._blind and node == "b" else folder
            answers |= LocalProbes(node).call_each(function, {node: (seen, names)}, timeout_s)
        return answers


def on_nodes(nodes: Nodes) -> Verify:
    agents: Future[Any] = Future()
    agents.set_result(nodes)
    return partial(verify, confirm=ClusterVerification(agents))


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    """A run with two checkpoints, whose files are a share each."""
    monkeypatch.setattr(on_cluster, "SHARE_FILES", 1)
    monkeypatch.setattr(on_cluster, "SHARE_BYTES", 1)
    save(tmp_path, 10)
    save(tmp_path, 20)
    return tmp_path


def test_each_file_is_read_once_and_by_all_nodes(run_dir, monkeypatch):
    nodes, hashed = Nodes(), []
    digest = verification.digest
    monkeypatch.setattr(
        verification, "digest", lambda path, *a: hashed.append(path.name) or digest(path, *a)
    )
    found = newest_good(run_dir, on_nodes(nodes))
    assert found.manifest.step == 20 and found.damaged == ()
    assert sorted(nodes.read["a"] + nodes.read["b"]) == sorted(FILES)
    assert all(nodes.read.values())
    assert sorted(hashed) == sorted(Path(name).name for name in FILES)


def test_a_node_that_does_not_see_the_disk_costs_no_checkpoint(run_dir):
    nodes = Nodes(blind=True)
    assert newest_good(run_dir, on_nodes(nodes)).manifest.step == 20
    assert nodes.read["b"]


@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_as_by_one_process(run_dir, name):
    file = run_dir / "checkpoints" / "step_00000020" / name
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DamagedCheckpoint) as alone:
        verification.verify(file.parents[len(Path(name).parts) - 1])
    found = newest_good(run_dir, on_nodes(Nodes()))
    assert found.manifest.step == 10
    assert [str(error) for error in found.damaged] == [str(alone.value)]


def test_waiting_for_the_nodes_ends_with_the_watch(run_dir):
    class Left(Exception):
        pass

    def watch(folder: Path, read: int, size: int) -> None:
        raise Left

    with pytest.raises(Left):
        newest_good(run_dir, partial(verify, watch=watch, confirm=ClusterVerification(Future())))
    assert os.path.exists(run_dir / "checkpoints" / "step_00000020" / SHARDS[0])
