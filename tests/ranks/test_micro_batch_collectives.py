"""What FSDP2 sends in each micro-batch of an optimizer step: what the dealing of responses assumes.

Counted by torch's own mode around each forward and backward, on two real ranks.
"""

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from hybridrl.config.choices import Accumulation
from hybridrl.distributed.fsdp import begin_micro_batch
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, fsdp_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import scheduled, training_batch

MICRO_BATCHES = 3
APART = {"reshard_after_forward": False}


def collectives_of_each(worker):
    """By micro-batch: collectives of its forward, of its backward."""
    ranks = dist.get_world_size()
    dealt = scheduled(training_batch(), num_ranks=ranks, mini_batch_size=8, max_tokens=1)
    ((micros, totals),) = dealt.shard(ranks)[dist.get_rank()].mini_batches()
    found = []
    for index, micro in enumerate(micros[:MICRO_BATCHES]):
        last = index == MICRO_BATCHES - 1
        begin_micro_batch(worker.model, worker.config.fsdp, last=last)
        with CommDebugMode() as forward:
            loss, _ = worker.policy_loss(micro, totals)
        with CommDebugMode() as backward:
            loss.backward()
        found.append((forward.get_total_counts(), backward.get_total_counts()))
    return found


def counted(folder, spec_changes):
    spec = fsdp_config(**{"dp_shard": 2, **spec_changes})
    return collectives_of_each(ActorWorker(actor_config(folder, spec), build_mesh(spec, "cpu")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder("qwen2", tmp_path_factory.mktemp("collectives") / "qwen2")


@pytest.mark.parametrize(
    "spec_changes", [APART, {"dp_shard": 1, "dp_replicate": 2}], ids=["gathered", "replicas"]
)
def test_middle_micro_batches_send_nothing(folder, spec_changes):
    for first, middle, last in run_on_ranks(counted, 2, folder, spec_changes):
        assert first[1] == 0
        assert middle == (0, 0)
        assert last[0] == 0 and last[1] > 0


@pytest.mark.parametrize(
    "spec_changes", [{}, {**APART, "accumulation": Accumulation.sharded}], ids=["default", "shards"]
)
def test_else_every_micro_batch_sends_something(folder, spec_changes):
    for found in run_on_ranks(counted, 2, folder, spec_changes):
        assert all(sum(counts) > 0 for counts in found)
