"""Copies of the weights step alike by construction, whatever order their ranks add norms in."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hybridrl.config.choices import Offload
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.training import Optimizer
from tests.support.launch import run_on_ranks
from tests.support.role_configs import fsdp_config, optim_config


class RoundsOtherwise(Optimizer):
    """Its second copy's norm is another float32: the next one up."""

    def gradient_norm(self):
        norm = super().gradient_norm()
        return (
            torch.nextafter(norm, torch.full_like(norm, torch.inf))
            if dist.get_rank() == 1
            else norm
        )


def steps():
    """Weights and norms of every step that clips, on this rank's copy of the weights."""
    torch.manual_seed(0)
    model = fully_shard(
        nn.Linear(64, 64), mesh=build_mesh(fsdp_config(dp_shard=1, dp_replicate=2), "cpu")
    )
    optimizer = RoundsOtherwise(model, optim_config(), total_steps=3, offload=Offload.none)
    found = []
    for _ in range(3):
        loss = model(torch.ones(1, 64)).square().sum()
        loss.backward()
        own = optimizer.gradient_norm()
        step = optimizer.apply_gradients(loss.detach())
        found.append((own, step.norm, model.weight.to_local().clone()))
    return found


def test_copies_step_alike_where_their_norms_round_differently():
    for one, other in zip(*run_on_ranks(steps, 2), strict=True):
        (own, norm, weight), (own_2, norm_2, weight_2) = one, other
        assert own != own_2 and own > 1, "the copies' norms differ, and both clip"
        assert norm == norm_2
        assert torch.equal(weight, weight_2)
