"""What the tests of aligned shards run on every rank, on CPUs and GPUs, and the orders expected."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from hybridrl.config.choices import Init, Layout
from hybridrl.config.errors import ConfigError
from hybridrl.distributed.fsdp import (
    load_sharded_critic,
    load_sharded_policy,
)
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.regions import named_shards
from hybridrl.distributed.torch_compat import ranks_as_given
from hybridrl.workers.actor import ActorWorker
from tests.support.role_configs import actor_config, fsdp_config, model_config
from tests.support.training_batches import my_part, training_batch
from tests.support.whole_weights import full_state_dict

COLUMNS = [
    f"model.layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in ("self_attn.o_proj", "mlp.down_proj")
]
# (ranks, dp_replicate), tp 2 -> the ranks of each copy in the order of their shards
ORDERS = {
    (2, 1): [[0, 1]],
    (4, 1): [[0, 2, 1, 3]],
    (4, 2): [[0, 1], [2, 3]],
    (8, 2): [[0, 2, 1, 3], [4, 6, 5, 7]],
}
TP = 2


def specs(replicas):
    shards = dist.get_world_size() // replicas
    plain = fsdp_config(shards, replicas, tensor_parallel_size=TP, layout=Layout.plain)
    aligned = fsdp_config(shards, replicas, tensor_parallel_size=TP, columns=COLUMNS)
    return plain, aligned


def look(folder, numbers_of_copies, device_type):
    """Everything the tests compare, of this rank, by the number of copies of the weights."""
    seen = {replicas: look_at(folder, replicas, device_type) for replicas in numbers_of_copies}
    return seen | {"groups": groups_of_older_torch()}


def groups_of_older_torch():
    """The ranks of a group made where torch is kept from sorting, and of one made after it."""
    with ranks_as_given():
        backwards = dist.new_group([1, 0])
    return [
        dist.get_process_group_ranks(group)
        for group in (backwards, dist.new_group([1, 0]))
        if group is not dist.GroupMember.NON_GROUP_MEMBER
    ]


def look_at(folder, replicas, device_type):
    plain, aligned = specs(replicas)
    mesh = build_mesh(aligned, device_type)
    policy = load_sharded_policy(model_config(folder), aligned, mesh, 7)
    critic = load_sharded_critic(model_config(folder), aligned, mesh, seed=3)
    whole = torch.arange(16.0, device=device_type).view(2, 8)
    return {
        "order": dist.get_process_group_ranks(mesh.get_group("dp_shard")),
        "copies": dist.get_process_group_ranks(mesh.get_group("dp_replicate")),
        "shard": mesh.get_local_rank("dp_shard"),
        "sliced": mesh["dp_shard"].get_local_rank(),
        "shards": {s.name: (s.shape, s.dim, s.local().cpu()) for s in named_shards(policy)},
        "contiguous": all(s.local().is_contiguous() for s in named_shards(policy)),
        "full": full_state_dict(policy),
        "critic": gathered(critic.backbone),
        "critic_cut": {n: p.placements[-1].dim for n, p in critic.backbone.named_parameters()},
        "gathered": distribute_tensor(whole, mesh["dp_shard"], [Shard(1)]).full_tensor().cpu(),
        "refused": [
            refusal(folder, aligned, name, mesh) for name in ("nowhere", "model.norm.weight")
        ],
        "random": random_weights(folder, [plain, aligned], device_type),
        "trained": [train(folder, spec, device_type) for spec in (plain, aligned)],
    }


def gathered(module):
    """Whole parameters by name, on the host."""
    return {name: p.detach().full_tensor().cpu() for name, p in module.named_parameters()}


def refusal(folder, spec, column, mesh):
    """What is said of a list of columns given by hand."""
    try:
        load_sharded_policy(model_config(folder), replace(spec, columns=[column]), mesh, 7)
    except ConfigError as error:
        return str(error)
    return ""


def random_weights(folder, layouts, device_type):
    """Of actor and critic, by layout: on all ranks the critic's, on rank 0 the actor's."""
    found = []
    for spec in layouts:
        mesh = build_mesh(spec, device_type)
        model = model_config(folder, Init.random, seed=11)
        actor = full_state_dict(load_sharded_policy(model, spec, mesh, 7))
        critic = load_sharded_critic(model, spec, mesh, seed=3)
        found.append((actor, gathered(critic.backbone)))
    return found


def train(folder, spec, device_type):
    """Weights and gradient norm after two updates of clipped AdamW steps."""
    actor = ActorWorker(actor_config(folder, spec), build_mesh(spec, device_type))
    mine = my_part(training_batch(), max(4, dist.get_world_size()))
    norms = [actor.update(mine, step=step, kl_coef=0.1)["actor/grad_norm"] for step in (1, 2)]
    return norms, full_state_dict(actor.model)
