"""What ranks that share sequences compute with actor, critic and reference."""

import torch.distributed as dist

from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.reference import ReferenceWorker
from hybridrl.workers.training import Training
from tests.support.role_configs import actor_config, critic_config, fsdp_config, reference_config
from tests.support.training_batches import PROMPTS, RESPONSES, scheduled, training_batch

# Each response alone, down to one of 3 tokens for 4 ranks; several together; all in one.
BUDGETS = (1, 40, sum(PROMPTS) + sum(RESPONSES))


class Run:
    """Actor, critic and reference of a model on this rank, and what they compute."""

    def __init__(self, folder, spec, device_type):
        mesh = build_mesh(spec, device_type)
        self.actor = ActorWorker(actor_config(folder, spec), mesh)
        self.critic = CriticWorker(critic_config(folder, spec), mesh)
        self.reference = ReferenceWorker(reference_config(folder, spec), mesh)
        self.actor.kl_coef = 0.1
        self.shards = dist.get_world_size() // ActorWorker.ranks_per_shard(self.actor.config)
        self.shard = dist.get_rank() * self.shards // dist.get_world_size()

    def dealt(self, batch, mini_batch_size, max_tokens):
        return scheduled(
            batch, num_ranks=self.shards, mini_batch_size=mini_batch_size, max_tokens=max_tokens
        )

    def per_token(self, dealt, worker_method):
        """Results of the first rank of each group, in the order of the batch."""
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, worker_method(dealt.shard(self.shards)[self.shard]))
        return dealt.join(results[:: len(results) // self.shards])

    def gradients(self, worker, loss, max_tokens):
        (mini,) = (
            self.dealt(training_batch(), 8, max_tokens)
            .shard(self.shards)[self.shard]
            .mini_batches()
        )
        training = Training(worker.optimizer, loss, worker.config.fsdp)
        training.accumulate_gradients(*mini)
        named = worker.model.named_parameters()
        full = {name: p.grad.full_tensor().cpu() for name, p in named}
        worker.optimizer.adamw.zero_grad()
        return full

    def step(self):
        """Old log-probs, then metrics of an update with them."""
        batch = training_batch()
        dealt = self.dealt(batch, 4, 30)
        old_log_probs = self.per_token(dealt, self.actor.compute_log_probs)
        mine = self.dealt(batch.adding(old_log_probs=old_log_probs), 4, 30).shard(self.shards)
        mine = mine[self.shard]
        return self.actor.update(mine, 1, kl_coef=0.1) | self.critic.update(mine, 1)


def computed(folder, changes, device_type="cpu"):
    """What a rank has to show: numbers by name, gradients by token budget, metrics, groups."""
    run = Run(folder, fsdp_config(**changes), device_type)
    alone = run.dealt(training_batch(), 8, 1)
    numbers = {
        "log_probs": run.per_token(alone, run.actor.compute_log_probs).values,
        "values": run.per_token(alone, run.critic.compute_values).values,
        "ref_log_probs": run.per_token(alone, run.reference.compute_log_probs).values,
    }
    gradients = {
        budget: run.gradients(run.actor, run.actor.policy_loss, budget)
        | run.gradients(run.critic, run.critic.value_loss, budget)
        for budget in BUDGETS
    }
    same_group = {run.actor.sequence_group, run.critic.sequence_group}
    return numbers, gradients, run.step(), len(same_group)
