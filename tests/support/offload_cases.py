"""Two steps of all roles under each offload schedule, on any device."""

import torch
import torch.distributed as dist

from hybridrl.config.choices import DType, Offload
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.reference import ReferenceWorker
from tests.support.role_configs import (
    actor_config,
    critic_config,
    fsdp_config,
    lora_config,
    reference_config,
)
from tests.support.training_batches import my_part, training_batch
from tests.support.whole_weights import full_state_dict

# Phases of a step in the trainer's order; "reshard" stands for reading the actor's shards.
PHASES = ("reshard", "old_log_probs", "ref_log_probs", "values", "update_critic", "update_actor")


def shard_bytes(worker):
    """Bytes of the storages under a worker's weights, FSDP2's padding included."""
    locals_ = (p.detach().to_local() for p in worker.weights._tensors())
    return sum(local.untyped_storage().nbytes() for local in locals_)


def moment_bytes(worker):
    return sum(
        state[name].to_local().untyped_storage().nbytes()
        for state in worker.optimizer.adamw.state.values()
        for name in ("exp_avg", "exp_avg_sq")
    )


def run_phase(phase, roles, step):
    """Do what the controller would ask for; return what came of it."""
    if phase == "reshard":
        roles["actor"].begin()
        named = roles["actor"].named_shards()
        shards = {shard.name: shard.local().clone() for shard in named}
        for role in roles.values():
            role.rest()
        return shards
    mine = my_part(training_batch(), step=step)
    if phase == "old_log_probs":
        return roles["actor"].compute_log_probs(mine).values
    if phase == "ref_log_probs":
        return roles["ref"].compute_log_probs(mine).values
    if phase == "values":
        return roles["critic"].compute_values(mine).values
    if phase == "update_critic":
        return roles["critic"].update(mine, step)
    return roles["actor"].update(mine, step, kl_coef=0.1)


def two_steps(folder, offload, device_type="cpu", dtype=DType.float32, lora_rank=0):
    """Everything two steps produce, and after each phase the bytes left on the device by role."""
    spec = fsdp_config(dp_shard=dist.get_world_size(), offload=offload, param_dtype=dtype)
    mesh = build_mesh(spec, device_type)
    roles = {
        "actor": ActorWorker(actor_config(folder, spec, lora=lora_config(lora_rank)), mesh),
        "critic": CriticWorker(critic_config(folder, spec), mesh),
        "ref": ReferenceWorker(reference_config(folder, spec, lora=lora_config(lora_rank)), mesh),
    }
    for role in roles.values():
        role.connect(roles)
    results, weights, moments = [], [], []
    for step in (1, 2):
        for phase in PHASES:
            results.append(run_phase(phase, roles, step))
            weights.append({name: shard_bytes(role) for name, role in roles.items()})
            moments.append({name: moment_bytes(roles[name]) for name in ("actor", "critic")})
    roles["actor"].begin()
    results.append(full_state_dict(roles["actor"].model))
    return results, weights, moments


def every_schedule(folder, *device_and_dtype):
    return {offload: two_steps(folder, offload, *device_and_dtype) for offload in Offload}


def assert_same_bits(found, wanted):
    """Tensors, or dicts of tensors or numbers, phase by phase."""
    assert len(found) == len(wanted) == 2 * len(PHASES) + 1
    for one, other in zip(found, wanted, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one.keys() == other.keys()
            for name in one:
                assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])), name
