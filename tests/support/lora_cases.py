"""What the tests of adapters share: factors that only names decide, so that B is not 0."""

import torch
from torch.distributed.tensor import distribute_tensor

from hybridrl.workers.actor import ActorWorker


def move_away(actor: ActorWorker) -> None:
    """Give every B numbers that its name decides: the same however weights are cut."""
    for name, param in actor.model.lm.named_parameters():
        if ".lora_B." in name:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            whole = 0.1 * torch.randn(param.shape, generator=generator)
            mesh, placements = param.device_mesh, param.placements
            mine = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            param.detach().to_local().copy_(mine.to_local())
