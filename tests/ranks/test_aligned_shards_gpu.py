"""Groups in an order of their own under NCCL, and aligned FSDP2 shards on 2 and 4 GPUs."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybridrl.distributed.mesh import new_group_in_order
from tests.support.aligned_cases import COLUMNS, ORDERS, look
from tests.support.launch import run_on_ranks
from tests.support.tiny_hf import tiny_folder

pytestmark = pytest.mark.gpu


def need(gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, found {torch.cuda.device_count()}")


def collectives_of_a_backward_group():
    """What each collective that FSDP2 and the reshard use does in a group of ranks [1, 0]."""
    group, rank = new_group_in_order([1, 0]), dist.get_rank()
    gathered = torch.empty(2, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank), device="cuda"), group)
    scattered = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(scattered, torch.tensor([10.0, 20.0], device="cuda"), group=group)
    exchanged = torch.empty(2, device="cuda")
    sent = torch.tensor([10.0 * rank, 10.0 * rank + 1], device="cuda")
    dist.all_to_all_single(exchanged, sent, group=group)
    return gathered.tolist(), scattered.tolist(), exchanged.tolist()


def test_nccl_follows_the_order_of_the_group():
    """Member 0 is global rank 1, member 1 is global rank 0."""
    need(2)
    zero, one = run_on_ranks(collectives_of_a_backward_group, 2, device_type="cuda")
    assert zero == ([1.0, 0.0], [40.0], [11.0, 1.0])
    assert one == ([1.0, 0.0], [20.0], [10.0, 0.0])


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_aligned_shards_lie_and_train_as_on_cpus(ranks, replicas, tmp_path):
    need(ranks)
    folder = tiny_folder("qwen2", tmp_path / "qwen2")
    seen = run_on_ranks(look, ranks, folder, [replicas], "cuda", device_type="cuda")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = dict(model.named_parameters(remove_duplicate=False))
    for rank, by_copies in enumerate(seen):
        one = by_copies[replicas]
        order = next(order for order in ORDERS[ranks, replicas] if rank in order)
        assert one["order"] == order
        for name, (_, dim, local) in one["shards"].items():
            assert dim == int(name in COLUMNS)
            parts = expected[name].chunk(len(order), dim)
            assert torch.equal(local, parts[order.index(rank)]), (name, rank)
        (_, critic), (_, aligned_critic) = one["random"]
        assert all(torch.equal(critic[name], aligned_critic[name]) for name in critic)
    first = seen[0][replicas]
    (plain_norms, plain), (norms, aligned) = first["trained"]
    assert norms == pytest.approx(plain_norms, rel=1e-4)
    for name, wanted in plain.items():
        torch.testing.assert_close(aligned[name], wanted, rtol=0, atol=2e-5)
